"""Rewards of your own in their three forms: one rollout, all rollouts at once, and async.

    legato train recipes/tiny.toml reward.kind=examples/own_rewards.py:near
    legato train recipes/tiny.toml reward.kind=examples/own_rewards.py:shortest_right
    legato train recipes/tiny.toml reward.kind=examples/own_rewards.py:judged

A reward returns a number, a mapping of numbers (its parts, each logged by name) or `legato.Unscorable("why")`.
"""

import asyncio
from collections.abc import Sequence

import legato
from legato.rewards.scoring import batched


def near(rollout: legato.Rollout) -> float:
    """Plain: called for one rollout after the other. Pays for digits that agree with the answer."""
    answer, text = str(rollout.problem.answer), rollout.text.strip()
    return sum(a == b for a, b in zip(answer, text, strict=False)) / max(len(answer), len(text), 1)


@batched
def shortest_right(rollouts: Sequence[legato.Rollout]) -> list[dict[str, float]]:
    """Batched: one call for all rollouts of a step, as a reward model needs it. Short right answers earn more."""
    right = [rollout.text.strip() == rollout.problem.answer for rollout in rollouts]
    longest = max((len(rollout.tokens) for rollout in rollouts), default=1)
    return [
        {"right": float(good), "brief": 0.1 * good * (1 - len(rollout.tokens) / longest)}
        for rollout, good in zip(rollouts, right, strict=True)
    ]


async def judged(rollout: legato.Rollout) -> float | legato.Unscorable:
    """Async: all rollouts of a step wait together. Put the call of your judge or sandbox where `sleep` stands."""
    await asyncio.sleep(0.001)
    if rollout.problem.answer is None:
        return legato.Unscorable("the problem has no answer")
    return float(rollout.problem.answer in rollout.text)
