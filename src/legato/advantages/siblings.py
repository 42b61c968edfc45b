"""Compares values that share an id (a group, a turn, a state), and decides when a group has a usable baseline.

A single value has no baseline. A group whose population standard deviation is at most 1e-6 * max(1, |mean|) is flat. Both
get exactly 0, so that a small denominator does not amplify rounding noise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.segments import ordered_sum

FLAT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Values of any shape compared with the members that share their id."""

    centred: Tensor
    """Value minus group mean; exactly 0 for single values, flat groups and values that are not members."""
    squares: Tensor
    """The sum of squared distances from the mean."""
    count: Tensor
    flat: Tensor

    def standardise(self, ddof: int, epsilon: float) -> Tensor:
        """`centred` divided by the standard deviation plus epsilon."""
        deviation = (self.squares / (self.count - ddof).clamp(min=1)).sqrt()
        return torch.where(self.centred == 0, 0.0, self.centred / (deviation + epsilon))


def compare(values: Tensor, ids: Tensor, member: Tensor | None = None) -> Siblings:
    """Compare each value with the members that share its id. Ids are dense from 0; by default all values are members."""
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
