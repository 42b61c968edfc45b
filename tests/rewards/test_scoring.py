"""Scoring many rollouts: plain, batch and async rewards keep the order and isolate failures."""

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from legato.core.rollout import Problem, Rollout, Score, TurnScores, Unscorable
from legato.rewards.overlong import OverlongPunishment
from legato.rewards.scoring import Component, WeightedSum, batched, judge_all
from legato.rewards.verifiers import ExactMatch
from tests.proof.responses import response


def make_rollout(text: str, answer: str = "42", length: int = 3) -> Rollout:
    return response(Problem(prompt="?", answer=answer), text, length)


ROLLOUTS = [make_rollout(text) for text in ("a", "bb", "", "dddd")]


def inverse_length(one: Rollout) -> float:
    return 1 / len(one.text)


@batched
def inverse_lengths(rollouts: Sequence[Rollout]) -> list[object]:
    return [1 / len(one.text) if one.text else Unscorable("empty") for one in rollouts]


async def slow_inverse_length(one: Rollout) -> float:
    # The first call is the last to return.
    await asyncio.sleep(0.05 * (4 - len(one.text)))
    return 1 / len(one.text)


@batched
async def slow_inverse_lengths(rollouts: Sequence[Rollout]) -> list[object]:
    await asyncio.sleep(0)
    return inverse_lengths(rollouts)


class Judge:
    async def __call__(self, one: Rollout) -> float:
        return await slow_inverse_length(one)


class Ranking:
    batch = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[object]:
        return inverse_lengths(rollouts)


FORMS = [
    inverse_length,
    inverse_lengths,
    slow_inverse_length,
    slow_inverse_lengths,
    Judge(),
    Ranking(),
    functools.partial(slow_inverse_length),
]


@pytest.mark.parametrize("reward", FORMS)
def test_every_form_of_reward_scores_in_order_and_isolates_failures(reward: object) -> None:
    scores = WeightedSum(components={"it": Component(reward=reward, weight=2.0)}).score_all(ROLLOUTS)
    assert [one.reward for one in scores if isinstance(one, Score)] == [2, 1, 0.5]
    assert isinstance(scores[2], Unscorable)
    assert scores[2].reason in ("it: ZeroDivisionError: division by zero", "it: empty")


@pytest.mark.parametrize("reward", FORMS)
def test_every_form_of_reward_scores_one_rollout_and_none(reward: object) -> None:
    whole = WeightedSum(components={"it": Component(reward=reward)})
    assert whole.score(ROLLOUTS[1]).components == {"it": 0.5}
    assert whole.score_all([]) == []


def test_async_rewards_run_concurrently() -> None:
    start = time.monotonic()
    judge_all(slow_inverse_length, [make_rollout("a")] * 50)
    assert time.monotonic() - start < 2


def test_async_rewards_run_inside_a_running_event_loop() -> None:
    async def notebook() -> list[object]:
        return WeightedSum(components={"it": Component(reward=slow_inverse_length)}).score_all(ROLLOUTS[:2])

    assert [one.reward for one in asyncio.run(notebook())] == [1, 0.5]


def test_only_the_async_reward_that_takes_too_long_is_cancelled() -> None:
    async def slow(one: Rollout) -> float:
        await asyncio.sleep(0 if one.text else 60)
        return 1.0

    scores = WeightedSum(components={"slow": Component(reward=slow)}, timeout_seconds=0.2).score_all(ROLLOUTS)
    assert scores[2] == Unscorable("slow: timed out after 0.2 s")
    assert [one.reward for one in scores if isinstance(one, Score)] == [1, 1, 1]


def test_timeouts_and_cancellations_raised_by_a_reward_are_reported_as_such() -> None:
    async def connect(one: Rollout) -> float:
        raise TimeoutError("no connection") if one.text else asyncio.CancelledError

    verdicts = judge_all(connect, ROLLOUTS[1:3], timeout_seconds=5)
    assert verdicts == [Unscorable("TimeoutError: no connection"), Unscorable("CancelledError: ")]


def test_a_time_limit_is_above_0() -> None:
    with pytest.raises(ValueError, match="timeout_seconds: expected a finite number > 0"):
        WeightedSum(components={"a": Component(reward=slow_inverse_length)}, timeout_seconds=0.0)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ([1.0], "returned 1 verdicts for 4 rollouts"),
        ([1.0] * 5, "returned more than 4 verdicts for 4 rollouts"),
        (1.0, "returned a float for 4 rollouts"),
        (None, "returned a NoneType for 4 rollouts"),
        ("1111", "returned a str for 4 rollouts"),
        ({"a": 1.0}, "returned a dict for 4 rollouts"),
    ],
)
def test_a_batch_reward_with_the_wrong_return_value_scores_nothing(returned: object, reason: str) -> None:
    verdicts = judge_all(batched(lambda _: returned), ROLLOUTS)
    assert len(verdicts) == 4
    assert all(isinstance(one, Unscorable) and reason in one.reason for one in verdicts), verdicts


def test_a_batch_reward_that_raises_scores_nothing_and_gives_the_reason() -> None:
    verdicts = judge_all(batched(lambda rollouts: [inverse_length(one) for one in rollouts]), ROLLOUTS)
    assert verdicts == [Unscorable("ZeroDivisionError: division by zero")] * 4


def test_a_bad_verdict_in_a_batch_affects_only_its_rollout() -> None:
    verdicts = judge_all(batched(lambda _: [1, float("nan"), {"a": 0.5}, None]), ROLLOUTS)
    assert verdicts[0] == {"": 1.0}
    assert verdicts[2] == {"a": 0.5}
    assert isinstance(verdicts[1], Unscorable)
    assert isinstance(verdicts[3], Unscorable)


def test_a_coroutine_that_is_never_awaited_is_reported() -> None:
    [verdict] = judge_all(lambda one: slow_inverse_length(one), ROLLOUTS[:1])
    assert "returned <coroutine object slow_inverse_length" in verdict.reason
    assert all(
        "coroutine" in one.reason for one in judge_all(batched(lambda rollouts: slow_inverse_length(rollouts[0])), ROLLOUTS)
    )


def test_a_component_does_not_score_rollouts_that_are_already_unscorable() -> None:
    scored_texts: list[str] = []

    @batched
    def second(rollouts: Sequence[Rollout]) -> list[float]:
        scored_texts.extend(one.text for one in rollouts)
        return [0.0] * len(rollouts)

    scores = WeightedSum(
        components={"first": Component(reward=inverse_length), "second": Component(reward=second)}
    ).score_all(ROLLOUTS)
    assert scored_texts == ["a", "bb", "dddd"]
    assert scores[2] == Unscorable("first: ZeroDivisionError: division by zero")
    assert scores[3].accuracy == 0.125


def test_the_overlong_penalty_counts_in_the_reward_and_not_in_accuracy() -> None:
    overlong = OverlongPunishment(cache_share=0.4, factor=0.5)
    whole = WeightedSum(components={"right": Component(reward=ExactMatch())}, overlong=overlong, longest_response=10)
    scores = whole.score_all([make_rollout("42", length=length) for length in (5, 8, 12)])
    assert [one.reward for one in scores] == [1, 0.75, 0.5]
    assert [one.accuracy for one in scores] == [1, 1, 1]
    assert [one.components["overlong"] for one in scores] == [0, -0.25, -0.5]
    with pytest.raises(ValueError, match="called 'overlong'"):
        WeightedSum(components={"overlong": Component(reward=ExactMatch())}, overlong=overlong)


def test_a_reward_may_score_each_turn() -> None:
    """Process scores: one number for each turn; other rewards stand at the last turn."""
    base = make_rollout("6")
    turns = replace(base, tokens=torch.arange(3), turn=torch.tensor([0, -1, 1]), mask=torch.tensor([True, False, True]))
    whole = WeightedSum(
        components={
            "steps": Component(reward=lambda rollout: TurnScores([0.25, 0.5]), weight=2.0),
            "end": Component(reward=lambda rollout: 1.0, judges=False),
        }
    )
    score = whole.score(turns)
    assert isinstance(score, Score) and score.reward == 2.5 and score.turn_rewards == (0.5, 2.0)
    for wrong, reason in (
        ([1.0], "expected a score for each of the 2 turns, got 1"),
        ([1.0, float("nan")], "for each turn"),
    ):
        verdict = WeightedSum(components={"steps": Component(reward=lambda rollout, w=wrong: TurnScores(w))}).score(turns)
        assert isinstance(verdict, Unscorable) and reason in verdict.reason
