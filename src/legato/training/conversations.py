"""Rollouts whose conversation lies in several rows: joined for estimators, which compare rollouts, and split again after.

A baseline counts each rollout once, however many rows its chat template made of it. A rollout's rows are joined end to end:
its turns count on from row to row, so that return-to-go and GAE run through the whole conversation.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from legato.advantages.estimator import Estimate
from legato.core.batch import Batch


@dataclass(frozen=True, slots=True)
class Pieces:
    """How the rows of a batch make up rollouts. Without `counts` each row is a rollout, and nothing is copied."""

    counts: tuple[int, ...] | None
    lengths: tuple[int, ...] = ()
    """The tokens of each row."""
    width: int = 0
    """T of the batch."""

    @classmethod
    def of(cls, batch: Batch) -> "Pieces":
        if batch.pieces is None:
            return cls(None)
        return cls(batch.pieces, tuple(batch.texts.lengths.tolist()), batch.texts.tokens.shape[1])

    def first(self, column: Tensor) -> Tensor:
        """The entries of a column by row, one for each rollout."""
        return column if self.counts is None else column[self._starts()]

    def first_known(self, column: Tensor | None) -> Tensor | None:
        return None if column is None else self.first(column)

    def join(self, table: Tensor, padding: int = 0) -> Tensor:
        """[B, T] -> [rollouts, longest]: the rows of each rollout end to end."""
        if self.counts is None:
            return table
        whole = [
            torch.cat([table[row, : self.lengths[row]] for row in range(start, start + count)])
            for start, count in zip(self._starts(), self.counts, strict=True)
        ]
        return pad_sequence(whole, batch_first=True, padding_value=padding)

    def join_known(self, table: Tensor | None) -> Tensor | None:
        return None if table is None else self.join(table)

    def split(self, estimate: Estimate) -> Estimate:
        """The estimate by rollout as an estimate by row."""
        if self.counts is None:
            return estimate
        returns = None if estimate.returns is None else self._split(estimate.returns)
        return replace(estimate, advantages=self._split(estimate.advantages), returns=returns)

    def _split(self, values: Tensor) -> Tensor:
        assert self.counts is not None
        if values.dim() == 1:
            return values.repeat_interleave(torch.tensor(self.counts))
        table = values.new_zeros(len(self.lengths), self.width)
        for rollout, (start, count) in enumerate(zip(self._starts(), self.counts, strict=True)):
            place = 0
            for row in range(start, start + count):
                table[row, : self.lengths[row]] = values[rollout, place : place + self.lengths[row]]
                place += self.lengths[row]
        return table

    def _starts(self) -> list[int]:
        assert self.counts is not None
        return (torch.tensor(self.counts).cumsum(0) - torch.tensor(self.counts)).tolist()
