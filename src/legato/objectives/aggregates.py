"""Aggregation: the weight n of each token in the loss. Denominators come from the counts of the whole update.

Every weight is constant along a row, so sums over per-response values need no [B, T] tensor.
"""

from typing import ClassVar

import torch
from torch import Tensor

from legato.core.counts import Tally
from legato.core.parts import choice, number, part
from legato.errors import InputError
from legato.objectives.slots import Aggregate

_DENOMINATOR = "'all': filtered and rejected tokens still count; 'kept': they leave the denominator."
_WORDS = ("all", "kept")


def _inverse(count: Tensor) -> Tensor:
    """1 / count, and 0 for a count of 0: the loss of an empty update is 0 and not NaN."""
    return torch.where(count > 0, 1 / count.clamp(min=1), 0.0)


@part("aggregate", "token-mean")
class TokenMean(Aggregate):
    """n = 1 / tokens of the update: long responses weigh more."""

    denominator: str = choice(*_WORDS, default="all", says=_DENOMINATOR)

    def weights(self, tally: Tally, lengths: Tensor, group: Tensor | None) -> Tensor:
        return _inverse(tally.tokens).to(lengths.dtype).expand_as(lengths)


@part("aggregate", "group-token-mean")
class GroupTokenMean(Aggregate):
    """n = 1 / (groups * tokens of the group): token mean inside each group, groups weigh the same (DAPO's formula)."""

    needs_groups: ClassVar[bool] = True
    denominator: str = choice(*_WORDS, default="all", says=_DENOMINATOR)

    def weights(self, tally: Tally, lengths: Tensor, group: Tensor | None) -> Tensor:
        assert group is not None and tally.group_tokens is not None
        groups = (tally.group_tokens > 0).sum().double()
        return (_inverse(groups) * _inverse(tally.group_tokens))[group].unsqueeze(1).to(lengths.dtype)


@part("aggregate", "sequence-mean")
class SequenceMean(Aggregate):
    """n = 1 / (sequences * length): the mean over responses of their token means."""

    denominator: str = choice(*_WORDS, default="all", says=_DENOMINATOR)

    def weights(self, tally: Tally, lengths: Tensor, group: Tensor | None) -> Tensor:
        return _inverse(tally.sequences).to(lengths.dtype) * _inverse(lengths)


@part("aggregate", "sequence-sum")
class SequenceSum(Aggregate):
    """n = 1 / sequences: the mean over responses of their token sums; the gradient norm grows with length."""

    denominator: str = choice(*_WORDS, default="all", says=_DENOMINATOR)

    def weights(self, tally: Tally, lengths: Tensor, group: Tensor | None) -> Tensor:
        return _inverse(tally.sequences).to(lengths.dtype).expand_as(lengths)


@part("aggregate", "sequence-sum-over-constant")
class SequenceSumOverConstant(Aggregate):
    """n = 1 / (sequences * constant): token sums over a fixed budget, so that no length is favoured (Dr. GRPO)."""

    constant: float | None = number(
        default=None,
        says="The response budget in tokens; must be given and must not change during a run.",
        above=0.0,
        optional=True,
    )
    denominator: str = choice(*_WORDS, default="all", says=_DENOMINATOR)

    def weights(self, tally: Tally, lengths: Tensor, group: Tensor | None) -> Tensor:
        if self.constant is None:
            raise InputError(
                "aggregate 'sequence-sum-over-constant' has no constant: give the response budget in tokens, for"
                ' instance {"aggregate.constant": 3000} (a run fills in rollouts.max_response_tokens)'
            )
        return _inverse(tally.sequences).to(lengths.dtype).expand_as(lengths) / self.constant
