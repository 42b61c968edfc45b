"""The world of several processes, on torch.distributed. What travels is flat tensors and JSON, never pickles."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from legato.core import sums as pieces
from legato.core.counts import Counts, Tally
from legato.core.sums import Piece, Sums, fetch, tensors_of


class ProcessGroup:
    """All processes of the default group of torch.distributed; `device` is where the backend wants tensors."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def sum_counts(self, counts: Counts) -> Counts:
        described, tensors = _describe_counts(counts)
        gathered = self._gather_tensors(described, tensors)
        total = sum(_read_counts(text, held) for text, held in gathered)
        assert isinstance(total, Counts)
        return _on(total, counts.all.tokens.device)

    def sum_metrics(self, sums: Sums) -> Sums:
        (here,) = fetch([sums])
        described = [[key, type(piece).__name__, len(tensors_of(piece))] for key, piece in here.items()]
        tensors = [tensor for piece in here.values() for tensor in tensors_of(piece)]
        return sum((_read_sums(text, held) for text, held in self._gather_tensors(described, tensors)), start=Sums())

    def sum_table(self, table: Tensor) -> Tensor:
        total = table.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(table.device)

    def gather(self, value: Any) -> Sequence[Any]:
        data = json.dumps(value).encode()
        return [json.loads(bytes(held.tolist())) for held in self._gather_bytes(_as_bytes(data))]

    def agree(self, choice: int) -> int:
        largest = torch.tensor(choice, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def _gather_tensors(self, described: Any, tensors: Sequence[Tensor]) -> list[tuple[Any, list[Tensor]]]:
        """What each rank described, and its tensors on the host."""
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        texts = self.gather([described, shapes])
        flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        packed = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        return [
            (text, _unpack(data, shapes)) for (text, shapes), data in zip(texts, self._gather_bytes(packed), strict=True)
        ]

    def _gather_bytes(self, data: Tensor) -> list[Tensor]:
        """The bytes of each rank; they may differ in number."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        dist.all_reduce(lengths)
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data.to(self.device)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return [held[:length].cpu() for held, length in zip(gathered, lengths.tolist(), strict=True)]


def _as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack(data: Tensor, shapes: Sequence[Any]) -> list[Tensor]:
    tensors, start = [], 0
    for name, shape in shapes:
        dtype: torch.dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(data[start : start + size].clone().view(dtype).reshape(shape))
        start += size
    return tensors


def _read_sums(described: Sequence[Any], tensors: Sequence[Tensor]) -> Sums:
    held, rest = dict[str, Piece](), iter(tensors)
    for key, kind, count in described:
        held[key] = getattr(pieces, kind)(*(next(rest) for _ in range(count)))
    return Sums(held)


_TALLY = ("tokens", "sequences", "group_tokens")


def _describe_counts(counts: Counts) -> tuple[Any, list[Tensor]]:
    described: dict[str, list[str]] = {"tables": sorted(counts.tables)}
    tensors: list[Tensor] = []
    for name in ("all", "kept"):
        tally = getattr(counts, name)
        if tally is not None:
            described[name] = [field for field in _TALLY if getattr(tally, field) is not None]
            tensors += [getattr(tally, field) for field in described[name]]
    return described, tensors + [counts.tables[name] for name in described["tables"]]


def _read_counts(described: Any, tensors: Sequence[Tensor]) -> Counts:
    rest = iter(tensors)
    tallies = {
        name: Tally(**{field: next(rest) for field in described[name]}) for name in ("all", "kept") if name in described
    }
    return Counts(all=tallies["all"], kept=tallies.get("kept"), tables={name: next(rest) for name in described["tables"]})


def _on(counts: Counts, device: torch.device) -> Counts:
    described, tensors = _describe_counts(counts)
    return _read_counts(described, [tensor.to(device) for tensor in tensors])
