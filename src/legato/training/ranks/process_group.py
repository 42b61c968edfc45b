"""The world of several processes, on torch.distributed. Ranks exchange flat tensors and JSON, never pickles."""

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
    """All processes of the default group of torch.distributed; `device` is where the backend needs its tensors."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def sum_counts(self, counts: Counts) -> Counts:
        layout, tensors = _split_counts(counts)
        gathered = self._gather_tensors(layout, tensors)
        total = sum(_join_counts(each, held) for each, held in gathered)
        assert isinstance(total, Counts)
        return _move_counts(total, counts.all.tokens.device)

    def sum_metrics(self, sums: Sums) -> Sums:
        (on_host,) = fetch([sums])
        layout = [[key, type(piece).__name__, len(tensors_of(piece))] for key, piece in on_host.items()]
        tensors = [tensor for piece in on_host.values() for tensor in tensors_of(piece)]
        return sum((_join_sums(each, held) for each, held in self._gather_tensors(layout, tensors)), start=Sums())

    def sum_table(self, table: Tensor) -> Tensor:
        total = table.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(table.device)

    def gather(self, value: Any) -> Sequence[Any]:
        data = json.dumps(value).encode()
        return [json.loads(bytes(text.tolist())) for text in self._gather_bytes(_as_bytes(data))]

    def agree(self, choice: int) -> int:
        largest = torch.tensor(choice, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def _gather_tensors(self, layout: Any, tensors: Sequence[Tensor]) -> list[tuple[Any, list[Tensor]]]:
        """The layout and the tensors of each rank, on the host."""
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        layouts = self.gather([layout, shapes])
        flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        data = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        return [
            (each, _read_tensors(part, shapes))
            for (each, shapes), part in zip(layouts, self._gather_bytes(data), strict=True)
        ]

    def _gather_bytes(self, data: Tensor) -> list[Tensor]:
        """The bytes of each rank. Ranks may have different numbers of bytes."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        dist.all_reduce(lengths)
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data.to(self.device)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return [part[:length].cpu() for part, length in zip(gathered, lengths.tolist(), strict=True)]


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


_TALLY = ("tokens", "sequences", "group_tokens")


def _split_counts(counts: Counts) -> tuple[Any, list[Tensor]]:
    """The names of the tensors in some counts, as JSON, and the tensors in that order."""
    layout: dict[str, list[str]] = {"tables": sorted(counts.tables)}
    tensors: list[Tensor] = []
    for name in ("all", "kept"):
        tally = getattr(counts, name)
        if tally is not None:
            layout[name] = [field for field in _TALLY if getattr(tally, field) is not None]
            tensors += [getattr(tally, field) for field in layout[name]]
    return layout, tensors + [counts.tables[name] for name in layout["tables"]]


def _join_counts(layout: Any, tensors: Sequence[Tensor]) -> Counts:
    """The inverse of `_split_counts`."""
    rest = iter(tensors)
    tallies = {name: Tally(**{field: next(rest) for field in layout[name]}) for name in ("all", "kept") if name in layout}
    return Counts(all=tallies["all"], kept=tallies.get("kept"), tables={name: next(rest) for name in layout["tables"]})


def _move_counts(counts: Counts, device: torch.device) -> Counts:
    layout, tensors = _split_counts(counts)
    return _join_counts(layout, [tensor.to(device) for tensor in tensors])
