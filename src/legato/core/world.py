"""How many processes there are, for code that must not care. Counts are summed over all of them before anything is split."""

from typing import Protocol, runtime_checkable

from legato.core.counts import Counts


@runtime_checkable
class World(Protocol):
    """Sums over all ranks."""

    rank: int
    size: int

    def sum(self, counts: Counts) -> Counts:
        """The counts of the whole update."""


class OneProcess:
    """The world of a run on one process: what it holds is all there is."""

    rank = 0
    size = 1

    def sum(self, counts: Counts) -> Counts:
        return counts
