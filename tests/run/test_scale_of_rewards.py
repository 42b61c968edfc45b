"""Rewards that leave 0 to 1, as many written for TRL do: accuracy stays an accuracy, and the held-out reward is shown."""

from pathlib import Path

import pytest

from legato.core.rollout import Rollout, Score
from legato.records.directory import RunDirectory
from legato.run.target import find
from legato.training.evaluate import outside_accuracy
from tests.proof.command import Command
from tests.proof.runs import Listener, run_small, steps, words

FILE = """
def pays_one(completions, **columns):
    return [float(len(text) == 3) for text in completions]


def pays_two(completions, **columns):
    return [2.0 * (len(text) == 3) for text in completions]


def distance(completions, **columns):
    return [-abs(20 - len(text)) for text in completions]
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(FILE)
    return str(tmp_path / "rewards.py")


def test_correctness_is_limited_and_the_verdict_is_kept() -> None:
    assert [Score(reward=0.0, accuracy=each).correctness for each in (-3.0, 0.25, 2.0)] == [0.0, 0.25, 1.0]
    assert outside_accuracy([]) is None


@pytest.mark.usefixtures("lightly")
def test_a_reward_of_two_for_a_right_answer_gives_the_accuracy_of_one(rewards: str, tmp_path: Path) -> None:
    listener = Listener()
    run_small(tmp_path / "two", {"reward.kind": f"{rewards}:pays_two", "training.steps": 1}, watcher=listener)
    run_small(tmp_path / "one", {"reward.kind": f"{rewards}:pays_one", "training.steps": 1})
    two, one = (RunDirectory.open(tmp_path / name / "run").metrics() for name in ("two", "one"))
    first = [next(record for record in each if record["kind"] == "evaluation") for each in (two, one)]
    assert first[0]["eval/accuracy_sampled"] == first[1]["eval/accuracy_sampled"] > 0
    assert first[0]["eval/reward_sampled"] == 2 * first[1]["eval/reward_sampled"]
    step = [next(record for record in each if record["kind"] == "step") for each in (two, one)]
    assert step[0]["accuracy/mean"] == step[1]["accuracy/mean"] and step[0]["reward/mean"] == 2 * step[1]["reward/mean"]
    assert listener.said.count("the reward judged an answer with 2: for accuracy") == 1
    rollouts = RunDirectory.open(tmp_path / "two" / "run").read_rollouts(1)
    assert {each["accuracy"] for each in rollouts} == {0.0, 1.0} and {each["reward"] for each in rollouts} == {0.0, 2.0}


@pytest.mark.usefixtures("lightly")
def test_a_reward_below_zero_is_evaluated_and_chosen_by(
    rewards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    legato = Command(monkeypatch, capsys)
    options = {"reward.kind": f"{rewards}:distance", "evaluation.best_metric": "eval/reward_sampled"}
    options["task.resampling"] = "dynamic"
    code, text, error = legato("train", *words(tmp_path, options))
    assert code == 0, error
    assert "held-out reward -" in text and "the best checkpoint is step-" in text and "eval/reward_sampled = -" in text
    assert "accuracy -" not in text and "sampled -" not in " ".join(text.split()).replace("held-out sampled", "")
    (row,) = [line.split() for line in text.splitlines() if line.startswith("reward ")]
    assert len(row) == 4 and all(-20 <= float(number) < 0 for number in row[1:3]) and row[3][0] in "+-"
    # Groups are compared by the verdicts as they are: limited to 0 to 1 all of them would be alike, and be replaced.
    assert all(record["update/applied"] == 1 for record in steps(tmp_path / "run"))
    code, text, error = legato("eval", str(tmp_path / "run"), "--samples", "2")
    assert code == 0, error
    assert "mean reward -" in text and "0.0%" in text
    assert find(str(tmp_path / "run")).resolved.config.evaluation.best_metric == "eval/reward_sampled"


@pytest.mark.usefixtures("lightly")
def test_an_accuracy_between_0_and_1_is_no_surprise(tmp_path: Path) -> None:
    def half(rollout: Rollout) -> float:
        return 0.5

    listener = Listener()
    run_small(tmp_path, {"training.steps": 1}, reward=half, watcher=listener)
    assert "judged an answer" not in listener.said
