"""Token, turn and sequence are one idea: segments of a response over which log-ratios are averaged.

A token is a segment of one; a turn is the tokens of one turn; a sequence is all tokens of a rollout (one row, unless
`rollout` ids say that several rows are one). Reductions are deterministic: a row is summed along its axis; sums that
cross rows or follow ids use an ordered addition and never float atomics.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from legato.core.mask import Mask
from legato.core.shapes import RowIds, Spread, TokenIds

Level = Literal["token", "turn", "sequence"]
LEVELS: tuple[Level, ...] = ("token", "turn", "sequence")


def renumber(ids: Tensor) -> Tensor:
    """The ids renumbered densely from 0; equal ids stay equal."""
    dense: Tensor = torch.unique(ids, return_inverse=True)[1]
    return dense


def ordered_sum(values: Tensor, ids: Tensor, size: int) -> Tensor:
    """[size]: sums of `values` that share an id, added in a fixed order, differentiable."""
    table = torch.zeros(size, dtype=values.dtype, device=values.device)
    if values.device.type == "cpu":
        return table.index_add(0, ids, values)
    # index_add uses float atomics on a GPU; index_put with accumulation sorts first, so its order is fixed.
    return table.index_put((ids,), values, accumulate=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The segments of a batch at one level."""

    level: Level
    mask: Mask
    turn: TokenIds | None = None
    """[B, T], -1 outside turns; needed at turn level."""
    rollout: RowIds | None = None
    """[B], dense from 0; rows with one id are one rollout."""

    def sum(self, values: Spread) -> Spread:
        """The sum over the segment of each token: [B, T] for tokens and turns, [B, 1] for sequences.

        `values` are [B, 1], constant along a row, or [B, T] and already 0 outside the mask.
        """
        if self.level == "token":
            return values
        if self.level == "turn":
            return self._turn_sum(values)
        constant = values.shape[1] == 1 and self.mask.tokens.shape[1] != 1
        return self.over_rows(values * self.mask.lengths if constant else values.sum(1, keepdim=True))

    def over_rows(self, rows: Tensor) -> Tensor:
        """[B, 1]: the sum over all rows of the same rollout, for each row."""
        if self.rollout is None:
            return rows
        return ordered_sum(rows.squeeze(1), self.rollout, len(self.rollout))[self.rollout].unsqueeze(1)

    def size(self) -> Spread:
        """The number of tokens in each segment."""
        if self.level == "sequence" and self.rollout is None:
            return self.mask.lengths
        return self.sum(self.mask.select(torch.ones_like(self.mask.lengths)))

    def mean(self, values: Spread) -> Spread:
        """The mean over each segment; 0 for an empty one, so that log s of an empty response is 0."""
        if self.level == "token":
            return values
        return self.sum(values) / self.size().clamp(min=1)

    def _turn_sum(self, values: Spread) -> Spread:
        assert self.turn is not None
        rows, width = self.mask.tokens.shape
        owner = torch.arange(rows, device=self.turn.device) if self.rollout is None else self.rollout
        # A turn index is below T, so row * T + turn numbers the segments without reading the largest turn from the device.
        turn = self.turn.clamp(min=0)
        ids = (owner.unsqueeze(1) * width + turn).reshape(-1)
        if self.rollout is not None:
            # Turns count on from row to row of a rollout, so that their numbers may be above T.
            ids = renumber(owner.unsqueeze(1) * (turn.max() + 1) + turn).reshape(-1)
        sums = ordered_sum(self.mask.select(values).reshape(-1), ids, rows * width)[ids].reshape(rows, width)
        return self.mask.select(sums)
