"""Training with two turns: rewards reach their turn, gradients reach only the policy's tokens, and resume is exact."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.advantages.estimator import Scores
from legato.algorithms.override import override
from legato.config.load import load
from legato.core.batch import collate
from legato.core.mask import Mask
from legato.core.rollout import START_STATE, Author, Group, Rollout, Score
from legato.dashboard.stored import show_rollout
from legato.pages.report import write_report
from legato.pages.turns import turns_of
from legato.records.directory import RunDirectory
from legato.rewards.environment import EnvironmentReward
from legato.rewards.overlong import OverlongPunishment
from legato.rewards.scoring import Component, WeightedSum
from legato.run import wire
from legato.run.train import resume
from legato.training.step import StepReport, Trainer
from legato.training.tables import Tables
from legato.training.update import Look
from tests.proof import turns
from tests.proof.runs import SMALL, cut_run, differences, light, outcome, records, run_small, steps

EXAMPLE = Path(__file__).parents[2] / "examples" / "second_guess.py"
OPTIONS: dict[str, Any] = {
    **{path: value for path, value in SMALL.items() if path != "task.left_digits"},
    "algorithm": "turn-gspo",
    "algorithm.advantage": "turn-return",
    "task.environment": f"{EXAMPLE}:SecondGuess",
    "task.kind": "reversal",
    "task.length": 1,
    "task.held_out": 2,
    "task.train_on_cut": True,  # an untrained model hardly ever ends a turn
    "policy.warm_up": {"steps": 20, "examples_per_step": 64, "lr": 1e-2},
    "rollouts.max_response_tokens": 20,
    "rollouts.samples_per_prompt": 8,
    "training.lr": 1e-3,
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[StepReport]]:
    """A run of four steps and its reports."""
    reports: list[StepReport] = []
    folder = tmp_path_factory.mktemp("turns")
    with light(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.proof.runs.SMALL", {})
        run = run_small(folder, OPTIONS, callback=reports.append)
    return run.directory, reports


def members(reports: list[StepReport]) -> list[tuple[Rollout, Score]]:
    return [(m.rollout, m.score) for report in reports for group in report.groups for m in group.members]


def test_a_two_turn_environment_trains(straight: tuple[Path, list[StepReport]]) -> None:
    lines = steps(straight[0])
    assert len(lines) == 4
    for line in lines:
        numbers = [value for value in line.values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers)) and line["update/applied"] == 1.0 and line["gradient/norm"] > 0
        assert line["rollouts/unscorable"] == 0.0 and 0 < line["reward/mean"] < 1
        assert 5 < line["length/mean"] <= 20 and line["reward/environment"] == line["reward/mean"]
    evaluation = next(record for record in records(straight[0]) if record["kind"] == "evaluation")
    assert 0 <= evaluation["eval/accuracy_sampled"] <= 1


def test_the_tables_record_who_wrote_each_token(straight: tuple[Path, list[StepReport]]) -> None:
    pairs = members(straight[1])
    assert {int(rollout.turn.max()) for rollout, _ in pairs} == {0, 1}
    words = wire.policy_of(load([], (), OPTIONS), wire.PythonObjects()).tokenizer
    for number, report in enumerate(straight[1]):
        for rollout, score in members([report]):
            own = rollout.author == Author.POLICY.value
            assert torch.equal(rollout.mask, own) and torch.equal(rollout.turn >= 0, own) and bool(own[0]) and bool(own[-1])
            assert rollout.version[own].unique().tolist() == [number] and (rollout.version[~own] == -1).all()
            assert rollout.turn_rewards == score.turn_rewards and score.reward == sum(score.turn_rewards or ())
            if int(rollout.turn.max()) == 1:
                assert words.decode(rollout.tokens[~own].tolist()) == "wrong, again:"
                assert rollout.turn[own].diff().min() >= 0
            right = rollout.text.strip() == rollout.problem.answer
            assert score.reward == (right * (1.0 if int(rollout.turn.max()) == 0 else 0.5))


def test_a_resumed_run_equals_the_straight_one(straight: tuple[Path, list[StepReport]], tmp_path: Path) -> None:
    with light():
        copy = cut_run(straight[0], tmp_path, 2)
        resume(copy)
    assert differences(outcome(straight[0]), outcome(copy)) == []


def trainer(**changes: Any) -> Trainer:
    """A trainer of an untrained model on an environment that rewards both turns."""
    options = {**OPTIONS, "task.environment": f"{turns.__file__}:Early", "policy.warm_up": False, "rollouts.stop": ["e"]}
    resolved = load([], (), {**options, **{name.replace("__", "."): value for name, value in changes.items()}})
    policy, source = wire.policy_of(resolved, wire.PythonObjects()), wire.source_of(resolved.config, wire.PythonObjects())
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, wire.PythonObjects()))
    return wire.trainer_of(resolved, policy, collector, None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": "gspo-token", "algorithm__advantage": "gigpo"},
        {"policy__model": "tiny-moe", "policy__tiny__experts": 4, "training__routing_replay": "R3"},
    ],
    ids=["turn-return", "gigpo", "routes"],
)
def test_the_gradient_reaches_only_what_the_policy_wrote(changes: dict[str, Any]) -> None:
    this = trainer(**changes)
    looks: list[Look] = []
    this.look = looks.append
    report = this.step()
    assert report.metrics["gradient/norm"] > 0
    reached = set()
    for look in looks:
        tokens, turn = look.signals.mask.tokens, look.signals.turn
        coefficients = look.outcome.coefficients
        assert turn is not None and (coefficients[~tokens] == 0).all()
        reached |= set(turn[coefficients != 0].tolist())
    assert reached == {0, 1}


def test_the_reward_of_a_turn_is_the_advantage_of_that_turn() -> None:
    """Turn-return by hand: the return-to-go of a turn beside the siblings that reached it."""
    this = trainer()
    this.algorithm = override(this.algorithm, {"advantage.normalise": "centre"})
    report = this.step()
    advantages = report.tensors["advantages"]
    row = both = 0
    for group in report.groups:
        rewards = [member.score.turn_rewards for member in group.members]
        assert all(each is not None for each in rewards)
        for member in group.members:
            rollout, own = member.rollout, member.score.turn_rewards
            for turn in range(len(own or ())):
                siblings = [sum(each[turn:]) for each in rewards if each is not None and len(each) > turn]
                mean = sum(siblings) / len(siblings)
                expected = sum((own or ())[turn:]) - mean if len(siblings) > 1 else 0.0
                values = advantages[row, : len(rollout.tokens)][rollout.turn == turn]
                assert values.tolist() == pytest.approx([expected] * len(values), abs=1e-6)
                both += turn == 1 and abs(expected) > 1e-3
            row += 1
    assert row == len(advantages) and both > 3


def test_gigpo_reads_the_states_of_the_environment() -> None:
    this = trainer(algorithm="gspo-token", algorithm__advantage="gigpo")
    groups, _ = this.source.next(4)
    batch = collate(groups)
    assert batch.turn_rewards is not None and batch.turn_states is not None
    assert batch.turn_rewards.shape == batch.turn_states.shape == (len(batch), 2)
    by_sign: dict[tuple[int, str], set[int]] = {}
    for row, member in enumerate(member for group in groups for member in group.members):
        rollout = member.rollout
        assert rollout.dialogue is not None and batch.turn_states[row, 0] == START_STATE
        if len(rollout.dialogue) == 3:
            by_sign.setdefault((int(batch.texts.group[row]), rollout.dialogue[0][:1]), set()).add(
                int(batch.turn_states[row, 1])
            )
    assert all(len(states) == 1 for states in by_sign.values())
    assert len({state for states in by_sign.values() for state in states}) > 3
    plain = this.algorithm.advantage.estimate(
        Scores(
            rewards=batch.rewards,
            group=batch.texts.group,
            mask=Mask(batch.texts.mask, torch.float64),
            turn=batch.turn,
            turn_rewards=batch.turn_rewards,
            turn_states=torch.arange(batch.turn_states.numel()).reshape(batch.turn_states.shape),
        )
    )
    tables = Tables.from_batch(batch, torch.device("cpu")).with_advantages(this.algorithm)
    assert tables.advantages is not None
    assert not torch.allclose(tables.advantages.double(), plain.advantages)


def rollout_with_turn_rewards(group: Group) -> Rollout:
    return next(m.rollout for m in group.members if len(m.rollout.turn_rewards or ()) == 2)


def test_other_reward_components_stand_at_the_last_turn() -> None:
    groups, _ = trainer().source.next(4)
    rollout = rollout_with_turn_rewards(groups[0])
    shaped: Callable[[Rollout], float] = lambda one: 0.25  # noqa: E731
    judged = WeightedSum(
        components={
            "environment": Component(reward=EnvironmentReward(), weight=2.0),
            "shape": Component(reward=shaped, weight=1.0, judges=False),
        },
        overlong=OverlongPunishment(cache_share=0.5, factor=1.0),
        longest_response=4,
    ).score(rollout)
    assert isinstance(judged, Score) and judged.turn_rewards is not None and rollout.turn_rewards is not None
    assert judged.turn_rewards[0] == 2 * rollout.turn_rewards[0]
    assert sum(judged.turn_rewards) == pytest.approx(judged.reward)
    other = WeightedSum(components={"shape": Component(reward=shaped)}).score(rollout)
    assert isinstance(other, Score) and other.turn_rewards is None


def test_a_failed_episode_is_left_out_and_the_run_continues(tmp_path: Path) -> None:
    file = tmp_path / "moody.py"
    file.write_text(
        "from legato.rollouts.episodes import Reply\n"
        "class Moody:\n"
        "    max_turns, deterministic = 2, True\n"
        "    def episode(self, problem):\n"
        "        return self\n"
        "    def reply(self, text, stop):\n"
        "        if len(text) % 2:\n"
        "            raise RuntimeError('odd')\n"
        "        return Reply(reward=float(len(text)), done=True)\n"
    )
    this = trainer(task__environment=f"{file}:Moody")
    groups, tally = this.source.next(4)
    assert tally.reasons == {"environment: RuntimeError: odd": tally.unscorable} and 0 < tally.unscorable < tally.rollouts
    assert all(m.rollout.fault is None and len(m.rollout.text) % 2 == 0 for g in groups for m in g.members)


def test_stored_rollouts_and_the_report_show_the_credit_of_each_turn(straight: tuple[Path, list[StepReport]]) -> None:
    directory = RunDirectory.open(straight[0])
    step = directory.rollout_steps()[-1]
    records = directory.read_rollouts(step)
    several = [record for record in records if len(record["dialogue"]) > 1 and "advantage" in record]
    assert several
    for record in several:
        turns_shown = turns_of(record)
        assert [turn["text"] for turn in turns_shown] == record["dialogue"][::2]
        assert [turn["reply"] for turn in turns_shown] == ["wrong, again:", ""]
        assert [turn["reward"] for turn in turns_shown] == record["turn_rewards"]
        assert len(record["turn_advantages"]) == 2
        shown = [
            [a for a, t in zip(record["details"]["advantages"], record["details"]["turns"], strict=True) if t == turn]
            for turn in range(2)
        ]
        assert [sum(each) / len(each) for each in shown] == pytest.approx(record["turn_advantages"], abs=1e-4)
    page = write_report(directory).read_text()
    assert "turn by turn</h2>" in page and "<em>wrong, again:</em>" in page
    assert show_rollout(directory, step, records.index(several[0]), whole=True)["turns"][0]["reply"] == "wrong, again:"
