"""How the trained weights are divided among ranks. Each rank optimises a piece of every weight: a run of its first axis.

`Whole`: one rank, which has all of every weight. `Divided`: every rank holds all weights and gradients; gradients are summed
and each rank gets the sum for its pieces, then the ranks exchange their updated pieces. FSDP2 divides the weights of layers
in the same way (`ranks/layers.py`), so that checkpoints of both have the same pieces.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from legato.core.world import others_waiting

_BUCKET = 2**26
"""Numbers that are exchanged at once: 256 MB of float32. A weight is never cut, so a larger one is a bucket of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run of the flat numbers of a weight."""

    start: int
    stop: int
    of: int
    """How many numbers the weight has."""
    tensor: Tensor
    """The weight itself, or a view of the run: updating it in place updates the weight."""
    is_matrix: bool
    """Whether the weight has two axes or more."""
    is_master: bool = False
    """Whether `tensor` is the float32 master of a 16-bit weight, and not the weight."""

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.of


@runtime_checkable
class Division(Protocol):
    """The pieces of this rank. Every method is called by all ranks together."""

    pieces: Mapping[str, Piece]

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of each piece, summed over ranks. Gradients of the weights may be freed."""

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of the whole gradient, from those of the pieces; a piece that holds nothing may be left out."""

    def publish(self) -> None:
        """Make the updated pieces known to all ranks."""

    def training(self) -> AbstractContextManager[None]:
        """Entered by all ranks for the passes and updates of a step: what they need may be held until it is left."""


class Whole:
    """All weights on one rank."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.weights = weights
        self.pieces: Mapping[str, Piece] = {
            name: Piece(0, weight.numel(), weight.numel(), weight, weight.dim() >= 2) for name, weight in weights.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        return {name: _gradient(weight) for name, weight in self.weights.items()}

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return total_norm(self.pieces, gradients)

    def publish(self) -> None:
        pass

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()


@runtime_checkable
class Exchange(Protocol):
    """The exchanges between ranks that a division needs (`ranks/process_group.py`)."""

    rank: int
    size: int

    def meet(self, operation: str) -> None: ...

    def exchanging(self, operation: str) -> AbstractContextManager[None]: ...

    def begin_exchange(self, operation: str) -> None: ...

    def end_exchange(self) -> None: ...

    def sum_table(self, table: Tensor) -> Tensor: ...

    def reduce_scatter(self, flat: Tensor) -> Tensor: ...

    def all_gather(self, whole: Tensor, part: Tensor) -> None: ...


class Divided:
    """All weights on every rank, and a piece of each to optimise."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], ranks: Exchange, pieces: Mapping[str, Piece] | None = None
    ) -> None:
        """`pieces`: those of this rank, if they lie elsewhere than in the weights; publishing then writes the weights."""
        self.weights, self.ranks = weights, ranks
        self.pieces: Mapping[str, Piece] = (
            {name: _own_piece(weight, ranks.rank, ranks.size) for name, weight in weights.items()}
            if pieces is None
            else pieces
        )
        self._apart = pieces is not None

    def gradients(self) -> dict[str, Tensor]:
        self.ranks.meet("sum gradients")
        if self.ranks.size == 1:
            return self._own_gradients()
        gradients: dict[str, Tensor] = {}
        with others_waiting():
            for bucket in _buckets(self.weights, self.ranks.size):
                gradients |= self._sum_bucket(bucket)
        return gradients

    def _sum_bucket(self, bucket: "_Bucket") -> dict[str, Tensor]:
        flat = bucket.flat(torch.promote_types(bucket.dtype, torch.float32))
        for weight, run in bucket.runs():
            if weight.grad is not None:
                _scatter(weight.grad, flat[:, run.start : run.stop])
                weight.grad = None
        part = self.ranks.reduce_scatter(flat.reshape(-1))
        runs = zip(bucket.weights, bucket.runs(), strict=True)
        lengths = {name: self.pieces[name].stop - self.pieces[name].start for name in bucket.weights}
        return {name: part[run.start : run.start + lengths[name]] for name, (_, run) in runs}

    def _own_gradients(self) -> dict[str, Tensor]:
        """The gradients of a rank that has no others to add."""
        gradients = {name: _gradient(weight).reshape(-1) for name, weight in self.weights.items()}
        for weight in self.weights.values():
            weight.grad = None
        return gradients

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return total_norm(self.pieces, gradients, self.ranks)

    @torch.no_grad()
    def publish(self) -> None:
        self.ranks.meet("exchange weights")
        if self.ranks.size == 1:
            if self._apart and self.weights:
                torch._foreach_copy_(
                    [weight.detach().view(-1) for weight in self.weights.values()],
                    [self.pieces[name].tensor for name in self.weights],
                )
            return
        with others_waiting():
            for bucket in _buckets(self.weights, self.ranks.size):
                flat = bucket.flat(bucket.dtype)
                part = torch.zeros_like(flat[0])
                for name, (_, run) in zip(bucket.weights, bucket.runs(), strict=True):
                    piece = self.pieces[name]
                    part[run.start : run.start + piece.stop - piece.start] = piece.tensor
                self.ranks.all_gather(flat.reshape(-1), part)
                for weight, run in bucket.runs():
                    _collect(flat[:, run.start : run.stop], weight.detach())

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()


def total_norm(pieces: Mapping[str, Piece], gradients: Mapping[str, Tensor], ranks: Exchange | None = None) -> Tensor:
    """The norm of the whole gradient: the norm of the norms of all weights, in the order of `pieces`.

    `gradients`: those of this rank's pieces. `ranks`: they have the others; None: these are all. A norm is rounded to the
    dtype of the gradients once per weight and once for all, so that one process and one rank get the same bits: another last
    digit of the clip would train other 16-bit weights. With several ranks the norm of a weight is that of its pieces,
    added up in float64.
    """
    own = dict(zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True)) if gradients else {}
    some = next(iter(pieces.values())).tensor
    nothing = some.new_zeros((), dtype=torch.promote_types(some.dtype, torch.float32))
    norms = torch.stack([own.get(name, nothing) for name in pieces])
    if ranks is not None:
        # The square of a float32 is exact in float64, and so is the root of a single square.
        norms = ranks.sum_table(norms.double().square()).sqrt().to(norms.dtype)
    whole: Tensor = torch.linalg.vector_norm(norms)
    return whole


def run_of(first_axis: int, rank: int, size: int) -> range:
    """The rows of a weight's first axis that a rank has, as `torch.chunk` and FSDP2 cut them; empty for late ranks."""
    each = -(-first_axis // size)
    return range(min(rank * each, first_axis), min((rank + 1) * each, first_axis))


def join_runs(own: Tensor, shape: torch.Size, ranks: Exchange) -> Tensor:
    """A whole weight from the flat runs of all ranks."""
    longest = len(_runs(shape, ranks.size)[0])
    part = torch.cat([own, own.new_zeros(longest - len(own))]) if len(own) < longest else own
    rows = own.new_empty(ranks.size, longest)
    ranks.all_gather(rows.view(-1), part)
    if rows.numel() == shape.numel():
        return rows.view(shape)
    whole = own.new_empty(shape)
    _collect(rows, whole)
    return whole


def _runs(shape: torch.Size, size: int) -> list[range]:
    """The flat numbers of a weight of this shape that each rank has."""
    first = shape[0] if shape else 1
    inner = shape.numel() // first if first else 0
    runs = [run_of(first, rank, size) for rank in range(size)]
    return [range(run.start * inner, run.stop * inner) for run in runs]


def _own_piece(weight: nn.Parameter, rank: int, size: int) -> Piece:
    run = _runs(weight.shape, size)[rank]
    flat = weight.detach().view(-1)[run.start : run.stop]
    return Piece(run.start, run.stop, weight.numel(), flat, weight.dim() >= 2)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Weights of one dtype that are exchanged at once, as a row of numbers per rank."""

    weights: Mapping[str, nn.Parameter]
    size: int

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.weights.values())).dtype

    def runs(self) -> Iterator[tuple[nn.Parameter, range]]:
        """Each weight with the columns that hold its run; a rank with a shorter run leaves the last ones at 0."""
        column = 0
        for weight in self.weights.values():
            longest = len(_runs(weight.shape, self.size)[0])
            yield weight, range(column, column + longest)
            column += longest

    def flat(self, dtype: torch.dtype) -> Tensor:
        """[ranks, columns]: zeros."""
        first = next(iter(self.weights.values()))
        return first.new_zeros(self.size, sum(len(run) for _, run in self.runs()), dtype=dtype)


def _buckets(weights: Mapping[str, nn.Parameter], size: int) -> Iterator[_Bucket]:
    """The weights in buckets of one dtype and device, of about `_BUCKET` numbers."""
    bucket: dict[str, nn.Parameter] = {}
    for name, weight in weights.items():
        first = next(iter(bucket.values()), weight)
        full = sum(each.numel() for each in bucket.values()) + weight.numel() > _BUCKET
        if bucket and (full or first.dtype != weight.dtype or first.device != weight.device):
            yield _Bucket(bucket, size)
            bucket = {}
        bucket[name] = weight
    if bucket:
        yield _Bucket(bucket, size)


def _scatter(weight: Tensor, rows: Tensor) -> None:
    """Write the run of each rank into its row."""
    size, flat = len(rows), weight.detach().reshape(-1)
    if len(flat) == rows.numel():
        rows.copy_(flat.view(size, -1))
        return
    for rank, run in enumerate(_runs(weight.shape, size)):
        rows[rank, : len(run)] = flat[run.start : run.stop]


def _collect(rows: Tensor, weight: Tensor) -> None:
    """The inverse of `_scatter`."""
    size, flat = len(rows), weight.view(-1)
    if len(flat) == rows.numel():
        flat.view(size, -1).copy_(rows)
        return
    for rank, run in enumerate(_runs(weight.shape, size)):
        flat[run.start : run.stop] = rows[rank, : len(run)]


def _gradient(weight: nn.Parameter) -> Tensor:
    """The gradient of a weight; 0 after an update without any row, so that momentum moves on."""
    if weight.grad is None:
        return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    return weight.grad.detach()
