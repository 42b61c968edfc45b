"""The ranks of a run: sums over all ranks, and choices that they agree on. One process is the case of one rank.

Two rules keep ranks together. Tables, plans and states are equal on all ranks. A choice that depends on time, signals,
memory or measurements goes through `agree`: no rank decides it alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from legato.core.sums import Sums


@runtime_checkable
class World(Protocol):
    """The processes of a run. Every method is called by all ranks, in the same order."""

    rank: int
    size: int

    def sum_metrics(self, sums: Sums) -> Sums:
        """The metrics of all ranks, merged in the order of ranks. A key need not exist on every rank."""

    def sum_table(self, table: Tensor) -> Tensor:
        """The sum of one table per rank; exact where each entry is nonzero on one rank only."""

    def gather(self, value: Any) -> Sequence[Any]:
        """One JSON value per rank, in the order of ranks."""

    def gather_tensors(self, value: Any, tensors: Sequence[Tensor]) -> Sequence[tuple[Any, Sequence[Tensor]]]:
        """A JSON value and some tensors of each rank, in the order of ranks; the tensors on the host."""

    def agree(self, choice: int) -> int:
        """The largest choice of any rank, so that a signal, a fallback or an alarm on one rank applies to all."""

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of rank 0."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on: their next call raises `OtherRankError`."""


class OneProcess:
    """The world of a run on one process: sums are its own values."""

    rank = 0
    size = 1

    def sum_metrics(self, sums: Sums) -> Sums:
        return sums

    def sum_table(self, table: Tensor) -> Tensor:
        return table

    def gather(self, value: Any) -> Sequence[Any]:
        return [value]

    def gather_tensors(self, value: Any, tensors: Sequence[Tensor]) -> Sequence[tuple[Any, Sequence[Tensor]]]:
        return [(value, tensors)]

    def agree(self, choice: int) -> int:
        return choice

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass


def on_first_rank(world: World, function: Callable[[], Any]) -> Any:
    """What a function returns on rank 0, on all ranks: a JSON value. An error there ends the others too."""
    return world.gather(function() if world.rank == 0 else None)[0]


def wait_for_all(world: World) -> None:
    """Return when every rank has come here."""
    world.agree(0)


@contextmanager
def others_waiting() -> Iterator[None]:
    """Mark errors raised inside: the other ranks wait for tensors of this one, where no message reaches them.

    `World.fail` then ends them instead of telling them.
    """
    try:
        yield
    except Exception as error:
        error.others_wait = True  # type: ignore[attr-defined]
        raise
