"""The ranks of a run: sums over all ranks, and choices that they agree on. One process is the case of one rank.

Two rules keep ranks together. Tables, plans and states are equal on all ranks. A choice that depends on time, signals,
memory or measurements goes through `agree`: no rank decides it alone.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from legato.core.counts import Counts
from legato.core.sums import Sums


@runtime_checkable
class World(Protocol):
    """The processes of a run. Every method is called by all ranks, in the same order."""

    rank: int
    size: int

    def sum_counts(self, counts: Counts) -> Counts:
        """The counts of the whole update."""

    def sum_metrics(self, sums: Sums) -> Sums:
        """The metrics of all ranks, merged in the order of ranks. A key need not exist on every rank."""

    def sum_table(self, table: Tensor) -> Tensor:
        """The sum of one table per rank; exact where each entry is nonzero on one rank only."""

    def gather(self, value: Any) -> Sequence[Any]:
        """One JSON value per rank, in the order of ranks."""

    def agree(self, choice: int) -> int:
        """The largest choice of any rank, so that a signal, a fallback or an alarm on one rank applies to all."""


class OneProcess:
    """The world of a run on one process: sums are its own values."""

    rank = 0
    size = 1

    def sum_counts(self, counts: Counts) -> Counts:
        return counts

    def sum_metrics(self, sums: Sums) -> Sums:
        return sums

    def sum_table(self, table: Tensor) -> Tensor:
        return table

    def gather(self, value: Any) -> Sequence[Any]:
        return [value]

    def agree(self, choice: int) -> int:
        return choice
