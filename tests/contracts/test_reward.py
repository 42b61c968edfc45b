"""The contract of a reward: a finite number, a breakdown of such or Unscorable; the same twice and in any order."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from legato.config.kinds import make
from legato.core.rollout import Problem, Rollout, Unscorable
from legato.rewards.scoring import is_async, is_batched
from legato.rewards.verifiers import finite
from tests.contracts.conftest import choose_names
from tests.contracts.texts import HOSTILE
from tests.proof import verdicts
from tests.proof.responses import response

OURS = ["exact", "number", "countdown", "format", "length", "environment", f"{verdicts.__file__}:early"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", choose_names(metafunc.config, "--reward", OURS), scope="module")


@pytest.fixture(scope="module")
def reward(name: str) -> Any:
    return make("reward", name, {})


def rollouts_of(problems: Sequence[Problem]) -> list[Rollout]:
    """Rollouts with many texts on every problem; some have turn rewards of an environment."""
    plain = [response(problem, text, 3) for problem in problems for text in (*HOSTILE.values(), problem.answer or "")]
    return [*plain, *(replace(rollout, turn_rewards=(0.5,)) for rollout in plain[:3])]


def judge(reward: Any, rollouts: Sequence[Rollout]) -> list[Any]:
    """Call the reward as training does, but let its exceptions through."""
    if is_batched(reward):
        verdicts = reward(list(rollouts))
        return list(asyncio.run(verdicts) if is_async(reward) else verdicts)
    if is_async(reward):

        async def all_of_them() -> list[Any]:
            return list(await asyncio.gather(*(reward(rollout) for rollout in rollouts)))

        return asyncio.run(all_of_them())
    return [reward(rollout) for rollout in rollouts]


def test_every_verdict_is_a_number_a_breakdown_or_unscorable(reward: Any, problems: list[Problem]) -> None:
    rollouts = rollouts_of(problems)
    verdicts = judge(reward, rollouts)
    assert len(verdicts) == len(rollouts)
    for rollout, verdict in zip(rollouts, verdicts, strict=True):
        parts = verdict.values() if isinstance(verdict, dict) and verdict else [verdict]
        right = isinstance(verdict, Unscorable) or all(finite(part) for part in parts)
        assert right, f"{verdict!r:.80} for {rollout.text!r:.80}"


def test_the_same_rollouts_get_the_same_verdicts(reward: Any, problems: list[Problem]) -> None:
    rollouts = rollouts_of(problems)
    assert judge(reward, rollouts) == judge(reward, rollouts)


def test_verdicts_do_not_depend_on_the_order(reward: Any, problems: list[Problem]) -> None:
    rollouts = rollouts_of(problems)
    assert judge(reward, rollouts[::-1])[::-1] == judge(reward, rollouts)


def test_a_reward_leaves_the_rollout_as_it_was(reward: Any, problems: list[Problem]) -> None:
    rollouts = rollouts_of(problems)
    before = [(rollout.text, rollout.tokens.clone(), dict(rollout.problem.fields)) for rollout in rollouts]
    judge(reward, rollouts)
    for rollout, (text, tokens, fields) in zip(rollouts, before, strict=True):
        assert rollout.text == text and (rollout.tokens == tokens).all() and dict(rollout.problem.fields) == fields
