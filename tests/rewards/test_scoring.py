"""Many rollouts at once: plain, batch and async rewards, in order, each failure its own."""

import asyncio
import functools
import time
from collections.abc import Sequence

import pytest

from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.rewards.overlong import OverlongPunishment
from legato.rewards.scoring import Component, WeightedSum, batched, judge_all
from legato.rewards.verifiers import ExactMatch
from tests.proof.responses import response


def rollout(text: str, answer: str = "42", length: int = 3) -> Rollout:
    return response(Problem(prompt="?", answer=answer), text, length)


ROLLOUTS = [rollout(text) for text in ("a", "bb", "", "dddd")]


def plain(one: Rollout) -> float:
    return 1 / len(one.text)


@batched
def whole_batch(rollouts: Sequence[Rollout]) -> list[object]:
    return [1 / len(one.text) if one.text else Unscorable("empty") for one in rollouts]


async def later(one: Rollout) -> float:
    # The first to be asked is the last to answer.
    await asyncio.sleep(0.05 * (4 - len(one.text)))
    return 1 / len(one.text)


@batched
async def later_batch(rollouts: Sequence[Rollout]) -> list[object]:
    await asyncio.sleep(0)
    return whole_batch(rollouts)


class Judge:
    async def __call__(self, one: Rollout) -> float:
        return await later(one)


class Ranking:
    batch = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[object]:
        return whole_batch(rollouts)


FORMS = [plain, whole_batch, later, later_batch, Judge(), Ranking(), functools.partial(later)]


@pytest.mark.parametrize("reward", FORMS)
def test_every_form_gives_scores_in_order_and_fails_alone(reward: object) -> None:
    found = WeightedSum(components={"it": Component(reward=reward, weight=2.0)}).score_all(ROLLOUTS)
    assert [one.reward for one in found if isinstance(one, Score)] == [2, 1, 0.5]
    assert isinstance(found[2], Unscorable)
    assert found[2].reason in ("it: ZeroDivisionError: division by zero", "it: empty")


@pytest.mark.parametrize("reward", FORMS)
def test_one_rollout_and_none(reward: object) -> None:
    whole = WeightedSum(components={"it": Component(reward=reward)})
    assert whole.score(ROLLOUTS[1]).components == {"it": 0.5}
    assert whole.score_all([]) == []


def test_async_rewards_run_at_once() -> None:
    start = time.monotonic()
    judge_all(later, [rollout("a")] * 50)
    assert time.monotonic() - start < 2


def test_async_rewards_run_where_a_loop_is_already_running() -> None:
    async def notebook() -> list[object]:
        return WeightedSum(components={"it": Component(reward=later)}).score_all(ROLLOUTS[:2])

    assert [one.reward for one in asyncio.run(notebook())] == [1, 0.5]


def test_an_async_reward_that_takes_too_long_is_cancelled_and_only_that_one() -> None:
    async def slow(one: Rollout) -> float:
        await asyncio.sleep(0 if one.text else 60)
        return 1.0

    found = WeightedSum(components={"slow": Component(reward=slow)}, timeout_seconds=0.2).score_all(ROLLOUTS)
    assert found[2] == Unscorable("slow: timed out after 0.2 s")
    assert [one.reward for one in found if isinstance(one, Score)] == [1, 1, 1]


def test_a_time_out_of_the_rewards_own_and_a_cancellation_are_told_as_what_they_are() -> None:
    async def connect(one: Rollout) -> float:
        raise TimeoutError("no connection") if one.text else asyncio.CancelledError

    found = judge_all(connect, ROLLOUTS[1:3], timeout_seconds=5)
    assert found == [Unscorable("TimeoutError: no connection"), Unscorable("CancelledError: ")]


@pytest.mark.parametrize("reward", [plain, whole_batch, ExactMatch()])
def test_a_time_limit_is_for_async_rewards(reward: object) -> None:
    with pytest.raises(ValueError, match="timeout_seconds = 1 is for async rewards"):
        WeightedSum(components={"a": Component(reward=reward)}, timeout_seconds=1.0)
    with pytest.raises(ValueError, match="timeout_seconds: expected a finite number > 0"):
        WeightedSum(components={"a": Component(reward=later)}, timeout_seconds=0.0)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ([1.0], "returned 1 verdicts for 4 rollouts"),
        ([1.0] * 5, "returned 5 verdicts for 4 rollouts"),
        (1.0, "returned a float for 4 rollouts"),
        (None, "returned a NoneType for 4 rollouts"),
        ("1111", "returned a str for 4 rollouts"),
        ({"a": 1.0}, "returned a dict for 4 rollouts"),
    ],
)
def test_a_batch_reward_that_returns_something_else_scores_nothing(returned: object, reason: str) -> None:
    found = judge_all(batched(lambda _: returned), ROLLOUTS)
    assert len(found) == 4
    assert all(isinstance(one, Unscorable) and reason in one.reason for one in found)


def test_a_batch_reward_that_raises_scores_nothing_and_says_why() -> None:
    found = judge_all(batched(lambda rollouts: [plain(one) for one in rollouts]), ROLLOUTS)
    assert found == [Unscorable("ZeroDivisionError: division by zero")] * 4


def test_one_bad_verdict_of_a_batch_is_its_own() -> None:
    found = judge_all(batched(lambda _: [1, float("nan"), {"a": 0.5}, None]), ROLLOUTS)
    assert found[0] == {"": 1.0}
    assert found[2] == {"a": 0.5}
    assert isinstance(found[1], Unscorable)
    assert isinstance(found[3], Unscorable)


def test_a_coroutine_that_nobody_will_await_is_told() -> None:
    [verdict] = judge_all(lambda one: later(one), ROLLOUTS[:1])
    assert "returned <coroutine object later" in verdict.reason
    assert all("coroutine" in one.reason for one in judge_all(batched(lambda rollouts: later(rollouts[0])), ROLLOUTS))


def test_a_component_is_not_asked_about_what_is_already_unscorable() -> None:
    seen: list[str] = []

    @batched
    def second(rollouts: Sequence[Rollout]) -> list[float]:
        seen.extend(one.text for one in rollouts)
        return [0.0] * len(rollouts)

    found = WeightedSum(components={"first": Component(reward=plain), "second": Component(reward=second)}).score_all(
        ROLLOUTS
    )
    assert seen == ["a", "bb", "dddd"]
    assert found[2] == Unscorable("first: ZeroDivisionError: division by zero")
    assert found[3].accuracy == 0.125


def test_the_punishment_for_length_is_in_the_reward_and_not_in_accuracy() -> None:
    overlong = OverlongPunishment(cache_share=0.4, factor=0.5)
    whole = WeightedSum(components={"right": Component(reward=ExactMatch())}, overlong=overlong, longest_response=10)
    found = whole.score_all([rollout("42", length=length) for length in (5, 8, 12)])
    assert [one.reward for one in found] == [1, 0.75, 0.5]
    assert [one.accuracy for one in found] == [1, 1, 1]
    assert [one.components["overlong"] for one in found] == [0, -0.25, -0.5]
    with pytest.raises(ValueError, match="called 'overlong'"):
        WeightedSum(components={"overlong": Component(reward=ExactMatch())}, overlong=overlong)
