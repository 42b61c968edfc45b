"""Comparing those that share an id: the one place that decides what a baseline is worth.

One alone has no baseline; a set whose population standard deviation is at most 1e-6 * max(1, |mean|) is flat. Both get
exactly 0, not rounding noise blown up by a small denominator.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.segments import ordered_sum

FLAT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Values of any shape beside those that share their id."""

    centred: Tensor
    """Minus the mean; exactly 0 for one alone, for a flat set and for what is no member."""
    squares: Tensor
    """The sum of squared distances from the mean."""
    count: Tensor
    flat: Tensor

    def standardise(self, ddof: int, epsilon: float) -> Tensor:
        """Over the standard deviation."""
        deviation = (self.squares / (self.count - ddof).clamp(min=1)).sqrt()
        return torch.where(self.centred == 0, 0.0, self.centred / (deviation + epsilon))


def compare(values: Tensor, ids: Tensor, member: Tensor | None = None) -> Siblings:
    """Each value beside the members that share its id; ids are dense from 0, all are members unless `member` says."""
    flat_ids, size = ids.reshape(-1), int(ids.max()) + 1 if ids.numel() else 0
    member = torch.ones_like(values, dtype=torch.bool) if member is None else member
    present = member.reshape(-1).to(values.dtype)

    def total(x: Tensor) -> Tensor:
        return ordered_sum(present * x.reshape(-1), flat_ids, size)[flat_ids].reshape(values.shape)

    count = total(torch.ones_like(values))
    mean = total(values) / count.clamp(min=1)
    distance = values - mean
    squares = total(distance.square())
    flat = (squares / count.clamp(min=1)).sqrt() <= FLAT * mean.abs().clamp(min=1.0)
    centred = torch.where(member & (count > 1) & ~flat, distance, 0.0)
    return Siblings(centred=centred, squares=squares, count=count, flat=flat)
