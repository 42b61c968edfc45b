"""Passes without effect: where ranks exchange layers inside a pass, all ranks must run equally many."""

import torch

from legato.core.outcome import Coefficients
from legato.core.texts import Texts
from legato.core.world import World
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy


def count_idle_passes(policy: Policy | Reference, passes: int, world: World) -> int:
    """How many passes a rank with so many of its own must run besides; 0 where passes exchange nothing.

    Ask before the first pass: in a pass ranks exchange layers, and cannot agree on anything else.
    """
    own = policy if isinstance(policy, Policy) else policy.policy
    return world.agree(passes) - passes if own.exchanges else 0


def run_idle_passes(policy: Policy | Reference, texts: Texts, count: int, *, backward: bool = False) -> None:
    """Run passes over the shortest row that have no effect; `backward`: and add a gradient of 0."""
    shortest = texts.lengths.argmin().reshape(1)
    for _ in range(count):
        if not backward:
            policy.score(texts, shortest)
            continue
        assert isinstance(policy, Policy)
        with policy.accumulate_gradient(texts, shortest) as forward:
            for piece in forward.pieces():
                piece.backward(Coefficients(logprobs=torch.zeros_like(piece.channels.logprobs)))
