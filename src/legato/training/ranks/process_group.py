"""The world of several processes, on torch.distributed. Ranks exchange flat tensors and JSON, never pickles.

Every operation begins with a meeting: a few integers of all ranks, from which each sees whether all want the same operation
and whether one of them has failed. So a rank that raises does not leave the others waiting, and ranks that have come apart
are told so instead of adding up numbers that do not belong together.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from legato.core import sums as pieces
from legato.core.out_of_memory import explain_out_of_memory, is_out_of_memory
from legato.core.sums import Piece, Sums, fetch, tensors_of
from legato.core.world import others_waiting
from legato.errors import InputError, LostRankError, OtherRankError, describe_error

_HOST = torch.device("cpu")
_SUMMABLE = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Dtypes that gloo cannot add, and those that hold the same values and that it can."""


# torch 2.13 renamed these two.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@runtime_checkable
class Observer(Protocol):
    """Follows what a rank is doing, so that others can tell who is missing (`watch.py`)."""

    def begin(self, operation: str) -> None:
        """The rank waits for the others in this operation."""

    def end(self) -> None:
        """The rank goes on."""

    def explain_loss(self) -> str | None:
        """Which rank is gone, for a message; None if it cannot be told."""

    def end_all(self, reason: str) -> None:
        """End the other ranks, which cannot be told otherwise."""


class ProcessGroup:
    """All processes of the default group of torch.distributed.

    JSON, counts and metrics are exchanged on the host. `device` is where tables and weights are exchanged.
    """

    def __init__(self, device: torch.device = _HOST, observer: Observer | None = None) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.observer = observer
        self.is_lost = False
        """Whether a rank has stopped answering: from then on nothing can be exchanged."""
        self._loss: str | None = None
        """Which rank that was, in words."""
        self._told: BaseException | None = None

    def sum_metrics(self, sums: Sums) -> Sums:
        self._meet("sum metrics")
        (on_host,) = fetch([sums])
        layout = [[key, type(piece).__name__, len(tensors_of(piece))] for key, piece in on_host.items()]
        tensors = [tensor for piece in on_host.values() for tensor in tensors_of(piece)]
        return sum((_join_sums(each, held) for each, held in self._gather_tensors(layout, tensors)), start=Sums())

    def sum_table(self, table: Tensor) -> Tensor:
        self._meet(f"sum a table of {list(table.shape)}")
        total = table.detach().to(self.device, _SUMMABLE.get(table.dtype, table.dtype), copy=True).contiguous()
        with self._explain_errors():
            dist.all_reduce(total)
        return total.to(table.device, table.dtype)

    def gather(self, value: Any) -> Sequence[Any]:
        self._meet("gather")
        return self._gather(value)

    def gather_tensors(self, value: Any, tensors: Sequence[Tensor]) -> Sequence[tuple[Any, Sequence[Tensor]]]:
        self._meet("gather tensors")
        return self._gather_tensors(value, tensors)

    def agree(self, choice: int) -> int:
        self._meet("agree")
        largest = torch.tensor(choice, dtype=torch.int64)
        with self._explain_errors():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """This rank's part of the sum of one flat tensor per rank, which is cut into as many equal parts as ranks."""
        part = flat.new_empty(len(flat) // self.size)
        with self._explain_errors():
            reduce_scatter_single(part, flat)
        return part

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill a flat tensor with the equal parts of all ranks, in the order of ranks."""
        with self._explain_errors():
            all_gather_single(whole, part)

    def broadcast(self, tensor: Tensor) -> None:
        self._meet(f"broadcast {list(tensor.shape)}")
        held = tensor.detach().to(self.device, copy=True).reshape(-1)
        with self._explain_errors():
            dist.broadcast(held.view(torch.uint8), src=0)
        with torch.no_grad():
            tensor.copy_(held.reshape(tensor.shape))

    def meet(self, operation: str) -> None:
        """Wait for the other ranks before an operation that is not one of these methods; raises if one has failed."""
        self._meet(operation)

    @contextmanager
    def exchanging(self, operation: str) -> Iterator[None]:
        """Inside, ranks exchange tensors in other ways than by these methods: the observer knows that they may wait."""
        self.begin_exchange(operation)
        try:
            with others_waiting():
                yield
        finally:
            self.end_exchange()

    def begin_exchange(self, operation: str) -> None:
        """From now on this rank may wait for the others in this operation; what it waited for before is there."""
        if self.observer is not None:
            self.observer.begin(operation)

    def end_exchange(self) -> None:
        """This rank does not wait any more."""
        if self.observer is not None:
            self.observer.end()

    def fail(self, error: BaseException) -> None:
        if self.is_lost or error is self._told or isinstance(error, OtherRankError | LostRankError):
            return
        self._told = error
        if getattr(error, "others_wait", False):
            # The other ranks wait for layers or gradients of this one, and would take a message for such.
            self.is_lost = True
            if self.observer is not None:
                self.observer.end_all(f"rank {self.rank}: {_words_of(error)}")
            return
        self._meet("fail", failed=True)
        signal = getattr(error, "signal", None)
        is_input = isinstance(error, InputError) or is_out_of_memory(error)
        self._gather([_words_of(error), is_input, None if signal is None else int(signal)])

    def _meet(self, operation: str, *, failed: bool = False) -> None:
        """Wait for the other ranks. Raises if one of them has failed or wants another operation."""
        code = zlib.crc32(operation.encode())
        header = torch.tensor([int(failed), code, -code])
        with self._explain_errors(operation):
            dist.all_reduce(header, op=dist.ReduceOp.MAX)
        any_failed, largest, smallest = header.tolist()
        if any_failed:
            if not failed:
                raise _other_rank_error(self._gather(None))
        elif largest != -smallest:
            wanted = self._gather(operation)
            listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(wanted))
            raise RuntimeError(f"the ranks have come apart: they want different operations ({listed})")

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, a connection that breaks while FSDP2 exchanges layers is a LostRankError that names the rank."""
        try:
            yield
        except RuntimeError as error:
            broken = isinstance(error, dist.DistError) or "gloo" in str(error)
            if not (broken and getattr(error, "others_wait", False)):
                raise
            raise self._explain_loss(error) from None

    @contextmanager
    def _explain_errors(self, operation: str = "") -> Iterator[None]:
        """Raise errors of the connection as LostRankError, and let the observer know that this rank waits."""
        if self.is_lost:
            raise LostRankError(self._loss or "another rank was lost before")
        if self.observer is not None:
            self.observer.begin(operation)
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._explain_loss(error) from None
        finally:
            if self.observer is not None:
                self.observer.end()

    def _explain_loss(self, error: Exception) -> LostRankError:
        """The error to raise where the connection to another rank has broken."""
        self.is_lost = True
        if self._loss is None:
            try:
                who = None if self.observer is None else self.observer.explain_loss()
            except KeyboardInterrupt:
                # torchrun sends SIGTERM to what is left of such a run, which before the first step raises this. The run ends
                # by its loss all the same, and must say of which rank.
                who = None if self.observer is None else self.observer.explain_loss()
            self._loss = who or f"another rank does not answer: {' '.join(str(error).split())[:200]}"
        return LostRankError(self._loss)

    def _gather(self, value: Any) -> list[Any]:
        data = json.dumps(value).encode()
        return [json.loads(bytes(text.tolist())) for text in self._gather_bytes(_as_bytes(data))]

    def _gather_tensors(self, value: Any, tensors: Sequence[Tensor]) -> list[tuple[Any, list[Tensor]]]:
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        values = self._gather([value, shapes])
        # Copied: a tensor of one element may have any stride, and then has no bytes to view.
        flat = [t.new_empty(t.numel(), device=_HOST).copy_(t.detach().reshape(-1)).view(torch.uint8) for t in tensors]
        data = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        return [
            (each, _read_tensors(part, shapes))
            for (each, shapes), part in zip(values, self._gather_bytes(data), strict=True)
        ]

    def _gather_bytes(self, data: Tensor) -> list[Tensor]:
        """The bytes of each rank. Ranks may have different numbers of bytes."""
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        with self._explain_errors():
            dist.all_reduce(lengths)
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with self._explain_errors():
            dist.all_gather(gathered, padded)
        return [part[:length] for part, length in zip(gathered, lengths.tolist(), strict=True)]


def _words_of(error: BaseException) -> str:
    """What the other ranks are told of an error."""
    if is_out_of_memory(error) and not isinstance(error, InputError):
        return explain_out_of_memory(error)
    return describe_error(error)


def _other_rank_error(failures: Sequence[Any]) -> OtherRankError:
    """The error to raise on ranks that could go on, from what each failed rank told."""
    failed = [(rank, each) for rank, each in enumerate(failures) if each is not None]
    rank, (words, is_input, signal) = failed[0]
    # A fault that all ranks meet is named once.
    same = [other for other, each in failed if each[0] == words]
    ranks = f"rank {rank}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
    return OtherRankError(f"{ranks}: {words}", is_input=is_input, signal=signal)


def _as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read_tensors(data: Tensor, shapes: Sequence[Any]) -> list[Tensor]:
    """Tensors from their bytes one after the other; `shapes` holds (dtype, shape) of each."""
    tensors, start = [], 0
    for name, shape in shapes:
        dtype: torch.dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(data[start : start + size].clone().view(dtype).reshape(shape))
        start += size
    return tensors


def _join_sums(layout: Sequence[Any], tensors: Sequence[Tensor]) -> Sums:
    """Sums from (key, class, number of tensors) of each piece, and all tensors in order."""
    by_key, rest = dict[str, Piece](), iter(tensors)
    for key, kind, count in layout:
        by_key[key] = getattr(pieces, kind)(*(next(rest) for _ in range(count)))
    return Sums(by_key)
