"""`legato.train(...)` from Python: problems, rewards of every form, modules, callbacks, and the result of a run."""

import asyncio
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import legato
from legato.config.load import load
from legato.core.rollout import Problem, Rollout, Unscorable
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.records.directory import RunDirectory
from legato.rewards.scoring import batched
from legato.run import wire
from legato.run.train import resume, train
from tests.proof.command import load_unchecked
from tests.proof.runs import SMALL, Listener, differences, outcome, run_small, steps, tensors

PROBLEMS: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "answer": n + 1, "level": n % 3} for n in range(40)]
ONE: dict[str, Any] = {"training.steps": 1, "evaluation.every_steps": 0}


pytestmark = pytest.mark.usefixtures("lightly")


def odd(rollout: Rollout) -> float:
    return float(int(rollout.tokens.sum()) % 2)


def test_the_public_name_is_this_function(tmp_path: Path) -> None:
    assert legato.train is train


def test_problems_may_be_mappings_whose_other_keys_are_fields(tmp_path: Path) -> None:
    problems: list[Problem] = []

    def reward(rollout: Rollout) -> float:
        problems.append(rollout.problem)
        return odd(rollout)

    run = run_small(tmp_path, ONE, problems=PROBLEMS, reward=reward)
    assert run.exit_code == 0
    assert {problem.prompt for problem in problems} <= {row["prompt"] for row in PROBLEMS}
    assert all(problem.answer == str(int(problem.prompt.split("+")[0]) + 1) for problem in problems)
    assert {problem.fields["level"] for problem in problems} <= {0, 1, 2}


def test_problems_may_be_problems(tmp_path: Path) -> None:
    problems = [Problem(prompt=row["prompt"], answer=str(row["answer"])) for row in PROBLEMS]
    assert run_small(tmp_path, ONE, problems=problems).exit_code == 0


def train_unchecked(folder: Path, **arguments: Any) -> None:
    """Call `train` without the type checks of the tests, as a user would."""
    options = {**SMALL, **ONE, "training.prompts_per_step": 40, "output.directory": str(folder / "runs")}
    load_unchecked("run/train.py").train(**arguments, **options)


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([], "problem"),
        ([{"prompt": "1="}], "problem"),
        ([{"question": "1="}], r"problems\[0\]"),
        ([*PROBLEMS, "1+1="], r"problems\[40\]"),
        ([*PROBLEMS, {"prompt": ""}], "prompt"),
        ([*PROBLEMS, {"prompt": None}], "prompt"),
        ([*PROBLEMS, {"prompt": 3}], "prompt"),
        ([*PROBLEMS, {"prompt": []}], "prompt"),
    ],
)
def test_malformed_problems_are_refused_before_the_run_begins(problems: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train_unchecked(tmp_path, problems=problems, reward=odd)
    assert not (tmp_path / "runs").exists()


# Rewards


def reward_in_parts(rollout: Rollout) -> dict[str, float]:
    return {"parity": odd(rollout), "length": len(rollout.text) / 10}


@batched
def batch_reward(rollouts: Sequence[Rollout]) -> list[float]:
    return [odd(rollout) for rollout in rollouts]


async def async_reward(rollout: Rollout) -> float:
    await asyncio.sleep(random.Random(str(rollout.tokens)).random() / 1000)
    return odd(rollout)


@batched
async def async_batch_reward(rollouts: Sequence[Rollout]) -> list[float]:
    await asyncio.sleep(0)
    return [odd(rollout) for rollout in rollouts]


class Judge:
    def __call__(self, rollout: Rollout) -> float:
        return odd(rollout)


@pytest.mark.parametrize(
    "reward", [batch_reward, async_reward, async_batch_reward, Judge()], ids=["batch", "async", "both", "object"]
)
def test_a_reward_of_any_form_gives_the_same_run(reward: Any, tmp_path: Path) -> None:
    plain = run_small(tmp_path / "plain", ONE, problems=PROBLEMS, reward=odd).directory
    other = run_small(tmp_path / "other", ONE, problems=PROBLEMS, reward=reward).directory
    one, two = outcome(plain), outcome(other)
    assert one["model/model.safetensors"] == two["model/model.safetensors"]
    assert steps(plain)[0]["reward/mean"] == steps(other)[0]["reward/mean"] > 0


def test_a_reward_in_parts_is_their_sum_and_each_part_is_shown(tmp_path: Path) -> None:
    record = steps(run_small(tmp_path, ONE, reward=reward_in_parts).directory)[0]
    parts = [record["reward/reward_in_parts/parity"], record["reward/reward_in_parts/length"]]
    assert record["reward/mean"] == pytest.approx(sum(parts))


class Fails:
    """A reward that fails for every third response, as `how` says."""

    def __init__(self, how: Any) -> None:
        self.how, self.calls, self.unscored = how, 0, 0

    def __call__(self, rollout: Rollout) -> Any:
        self.calls += 1
        if self.calls % 3:
            return odd(rollout)
        self.unscored += 1
        if isinstance(self.how, Exception):
            raise self.how
        return self.how


HOWS = [
    RuntimeError("the judge is away"),
    math.nan,
    math.inf,
    None,
    "1.0",
    {},
    {"a": math.nan},
    1j,
    Unscorable("no idea"),
]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: repr(how)[:20])
def test_a_reward_that_fails_is_unscorable_and_never_0(how: Any, tmp_path: Path) -> None:
    listener, reports = Listener(), list[Any]()
    reward = Fails(how)
    run = run_small(tmp_path, {**ONE, "task.held_out": 1}, reward=reward, watcher=listener, callback=reports.append)
    record = steps(run.directory)[0]
    assert 0 < record["rollouts/unscorable"] < 0.5
    scored = [member for group in reports[0].groups for member in group.members]
    assert len(scored) == round(16 * (1 - record["rollouts/unscorable"]))
    assert all(member.score.reward == odd(member.rollout) for member in scored)
    assert record["reward/mean"] == pytest.approx(sum(odd(member.rollout) for member in scored) / len(scored))
    assert listener.said.count("could not be scored") >= 1
    assert all(math.isfinite(value) for key, value in record.items() if key.startswith("loss/"))


def test_the_error_of_a_reward_is_printed_once(tmp_path: Path) -> None:
    listener = Listener()
    run_small(tmp_path, {"training.steps": 3}, reward=Fails(RuntimeError("the judge is away")), watcher=listener)
    assert listener.said.count("the judge is away") == 1


def test_steps_without_a_score_change_no_weight(tmp_path: Path) -> None:
    def reward(rollout: Rollout) -> float:
        if rollout.rollout_id < 16:
            return odd(rollout)
        raise OSError("no network")

    run = run_small(tmp_path, {"training.steps": 3}, reward=reward).directory
    record = steps(run)[1]
    assert (record["rollouts/unscorable"], record["update/applied"]) == (1, 0)
    assert record["reward/mean"] is None
    one, two, three = (weights_at(run, step) for step in (1, 2, 3))
    assert one == two == three


def weights_at(run: Path, step: int) -> dict[str, str]:
    return tensors(run / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


def test_of_several_rewards_the_one_that_reads_the_answer_judges_it(tmp_path: Path) -> None:
    def in_form(completions: Any, **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    def right(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    run = run_small(tmp_path / "column", ONE, problems=PROBLEMS, reward=[in_form, right])
    assert run.accuracy == 0
    assert any("the reward right decides" in note for note in RunDirectory.open(run.directory).metrics()[0]["notes"])
    run = run_small(tmp_path / "none", ONE, problems=PROBLEMS, reward=[in_form, in_form])
    assert run.accuracy == 1


def test_a_reward_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward"):
        train_unchecked(tmp_path, reward=3)
    assert not (tmp_path / "runs").exists()


def test_a_reward_may_be_named(tmp_path: Path) -> None:
    assert "reward/exact" in steps(run_small(tmp_path, ONE, reward="exact").directory)[0]


def test_rewards_that_reseed_global_generators_do_not_change_the_rollouts(tmp_path: Path) -> None:
    def rude(rollout: Rollout) -> float:
        random.seed(0)
        torch.manual_seed(0)
        return odd(rollout)

    rude.__name__ = "odd"
    polite, rudely = (
        run_small(tmp_path / name, {"training.steps": 2}, reward=reward).directory
        for name, reward in (("polite", odd), ("rude", rude))
    )
    names = differences(outcome(polite), outcome(rudely))
    assert set(names) <= {"trainer.json/generators", "random.safetensors"}


# Models, callbacks and the result


def test_a_module_with_its_tokenizer_is_trained_in_place(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    module = tiny_model(TinyShape(hidden=32, layers=1, heads=2), vocabulary=len(tokenizer), seed=3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run = run_small(tmp_path, ONE, model=module, tokenizer=tokenizer, reward=odd)
    assert any(not torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert run.model_folder is not None
    saved = load_file(run.model_folder / "model.safetensors")
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in saved.items())


def test_a_module_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    module = tiny_model(TinyShape(hidden=32, layers=1, heads=2), vocabulary=90, seed=3)
    with pytest.raises(ValueError, match="tokenizer"):
        run_small(tmp_path / "runs", ONE, model=module)
    assert not (tmp_path / "runs").exists()


def test_the_callback_sees_every_step(tmp_path: Path) -> None:
    reports: list[Any] = []
    run = run_small(tmp_path, {"training.steps": 3}, callback=reports.append)
    assert [report.step for report in reports] == [1, 2, 3]
    assert all(len(report.groups) == 4 for report in reports)
    assert [report.metrics["reward/mean"] for report in reports] == [s["reward/mean"] for s in steps(run.directory)]


def test_a_run_returns_its_paths_and_how_it_ended(tmp_path: Path) -> None:
    run = run_small(tmp_path, {"training.steps": 2}, reward=odd, algorithm="grpo")
    assert run.directory == tmp_path / "run"
    assert run.model_folder == tmp_path / "run" / "checkpoints" / "step-000002" / "model"
    assert (run.reason, run.exit_code) == ("all steps done", 0)
    last = [r for r in RunDirectory.open(run.directory).metrics() if r["kind"] == "evaluation"][-1]
    assert (run.accuracy, run.accuracy_greedy) == (last["eval/accuracy_sampled"], last["eval/accuracy_greedy"])
    assert (run.directory / "environment.json").is_file()


def test_an_algorithm_may_be_a_value(tmp_path: Path) -> None:
    value = legato.algorithm("gspo", {"objective.trust.clip.low": 0.5})
    run = run_small(tmp_path, ONE, algorithm=value)
    assert load([run.directory / "config.toml"]).algorithm == value


def test_two_runs_without_a_name_have_two_names(tmp_path: Path) -> None:
    one, other = (run_small(tmp_path, {**ONE, "output.name": None}).directory for _ in range(2))
    assert one != other


def test_a_run_on_problems_given_in_python_is_not_named_after_a_task(tmp_path: Path) -> None:
    run = run_small(tmp_path, {**ONE, "output.name": None}, problems=PROBLEMS, reward=odd)
    assert run.directory.name == "problems-gspo-seed0-1"


def test_the_environment_file_holds_no_variable_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    run = run_small(tmp_path, ONE).directory
    assert not [path for path in run.rglob("*") if path.is_file() and b"hf_secret_of_mine" in path.read_bytes()]


def test_a_run_from_python_resumes_with_the_same_inputs(tmp_path: Path) -> None:
    straight = run_small(tmp_path / "straight", {"training.steps": 3}, problems=PROBLEMS, reward=odd).directory

    def stop(report: Any) -> None:
        if report.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_small(tmp_path / "cut", {"training.steps": 3}, problems=PROBLEMS, reward=odd, callback=stop)
    listed = [Problem(prompt=p["prompt"], answer=str(p["answer"]), fields={"level": p["level"]}) for p in PROBLEMS]
    resume(tmp_path / "cut" / "run", objects=wire.PythonObjects(problems=listed, reward=odd))
    assert differences(outcome(straight), outcome(tmp_path / "cut" / "run")) == []


@pytest.mark.parametrize("missing", ["problems", "reward", "model"])
def test_a_run_from_python_does_not_resume_without_its_inputs(missing: str, tmp_path: Path) -> None:
    """Inputs given in Python are not in the recipe; the inputs of the recipe would make another run."""
    tokenizer = character_tokenizer()
    module = tiny_model(TinyShape(hidden=32, layers=1, heads=2), vocabulary=len(tokenizer), seed=3)
    arguments: dict[str, Any] = {"problems": {"problems": PROBLEMS}, "reward": {"reward": odd}, "model": {}}[missing]
    if missing == "model":
        arguments = {"model": module, "tokenizer": tokenizer, "algorithm": "grpo", "problems": None}
    run = run_small(tmp_path, {**ONE, "algorithm.objective.penalties.kl.beta": 0.1}, **arguments).directory
    with pytest.raises(ValueError, match=missing):
        resume(run, ["training.steps=2"])


def test_train_prints_its_progress_as_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []
    run = run_small(
        tmp_path,
        {"training.steps": 2, "evaluation.every_steps": 0},
        callback=lambda report: printed.append(capsys.readouterr().out),
    )
    assert run.exit_code == 0
    assert "run: gspo on tiny" in printed[0] and "step 1/2" in printed[0]
    assert "step 2/2" in printed[1]
    quiet = run_small(tmp_path / "quiet", {"training.steps": 1, "evaluation.every_steps": 0}, progress=False)
    assert quiet.exit_code == 0 and capsys.readouterr().out == ""
