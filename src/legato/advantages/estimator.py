"""The arguments and the result of an advantage estimator."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from legato.core.mask import Mask
from legato.core.parts import Part
from legato.core.segments import ordered_sum
from legato.core.shapes import PerSequence, PerToken, RowIds, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scored responses of a whole step in float64: statistics are taken before the step is split into updates."""

    rewards: PerSequence
    group: RowIds | None = None
    """[B], dense from 0."""
    mask: Mask | None = None
    values: PerToken | None = None
    turn: TokenIds | None = None
    turn_rewards: Tensor | None = None
    """[B, U]: the reward of each turn. Entries of turns that a response did not reach are not read."""
    turn_states: Tensor | None = None
    """[B, U] integers: equal ids are the same environment state at the start of the turn."""
    components: Tensor | None = None
    """[B, C]: the components of the reward; NaN where one does not apply to a response."""
    old_logprobs: PerToken | None = None
    ref_logprobs: PerToken | None = None

    def group_sum(self, values: Tensor) -> Tensor:
        """[B]: the sum over each response's group."""
        assert self.group is not None
        return ordered_sum(values, self.group, len(self.group))[self.group]

    def group_size(self) -> Tensor:
        return self.group_sum(torch.ones_like(self.rewards))

    def lengths(self) -> Tensor:
        """[B]: tokens of each response."""
        assert self.mask is not None
        return self.mask.lengths.squeeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Advantages `[B]` or `[B, T]` in float64, and the targets of the value function, if there is one."""

    advantages: PerSequence | PerToken
    returns: PerToken | None = None


class Estimator(Part):
    """Turns rewards into advantages."""

    __slots__ = ()
    kind: ClassVar[str] = "advantage"
    needs_groups: ClassVar[bool] = True

    def needs(self) -> tuple[str, ...]:
        return ()

    def estimate(self, scores: Scores) -> Estimate:
        raise NotImplementedError


def reward_with_divergence(scores: Scores, beta: float) -> PerSequence:
    """r - beta * sum over tokens of (old - ref): the penalty inside the reward, k1 form."""
    if beta == 0:
        return scores.rewards
    assert scores.mask is not None and scores.old_logprobs is not None and scores.ref_logprobs is not None
    return scores.rewards - beta * scores.mask.sum(scores.old_logprobs - scores.ref_logprobs).squeeze(1)


def divergence_needs(beta: float) -> tuple[str, ...]:
    return ("mask", "old_logprobs", "ref_logprobs") if beta else ()
