"""The saved state of an optimizer, from which each rank reads its own pieces, whatever ranks wrote it.

A key is `kind|weight`, or `kind|weight|start` for a piece that begins at the number `start` of the flat weight.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from legato.errors import InputError
from legato.training.pieces import Piece


class SavedTensors:
    """Tensors by key: in memory, or in safetensors files that are read when a tensor is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, files: Sequence[Path] = ()) -> None:
        self._held = dict(tensors or {})
        self._shapes = {key: tuple(tensor.shape) for key, tensor in self._held.items()}
        self._files: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as contents:
                for key in contents.keys():  # noqa: SIM118 - it is no mapping
                    self._shapes[key] = tuple(contents.get_slice(key).get_shape())
                    self._files[key] = file

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return self._shapes

    def read(self, key: str) -> Tensor:
        """A whole tensor."""
        if key in self._held:
            return self._held[key]
        with safe_open(self._files[key], framework="pt") as contents:
            tensor: Tensor = contents.get_tensor(key)
            return tensor


class SavedState:
    """The optimizer state of a checkpoint: its tensors, and its plain numbers under the same kind of key."""

    def __init__(self, tensors: SavedTensors, numbers: Mapping[str, Any]) -> None:
        self.tensors, self.numbers = tensors, numbers
        self._runs: dict[tuple[str, str], list[tuple[int, str]]] = {}
        """For each kind and weight: where its saved runs begin, and their keys."""
        for key in [*tensors.shapes(), *numbers]:
            kind, _, place = key.partition("|")
            name, _, start = place.partition("|")
            if name:
                self._runs.setdefault((kind, name), []).append((int(start or 0), key))
        self._kinds: dict[str, set[str]] = {}
        for (kind, name), runs in self._runs.items():
            runs.sort()
            self._kinds.setdefault(name, set()).add(kind)

    def kinds(self, name: str) -> set[str]:
        """What is saved of a weight: "master", "exp_avg" ..."""
        return self._kinds.get(name, set())

    def read(self, kind: str, name: str, piece: Piece) -> Any:
        """The saved numbers of a piece, from one or several saved runs; a plain number as it is."""
        runs, shapes = self._runs[kind, name], self.tensors.shapes()
        first = runs[0][1]
        if first in self.numbers:
            return self.numbers[first]
        if not shapes[first]:
            return self.tensors.read(first)  # the number of steps, which is the same for all pieces
        spans = [(start, start + prod(shapes[key]), key) for start, key in runs]
        for start, stop, key in spans:
            if (start, stop) == (piece.start, piece.stop):
                return self.tensors.read(key)
        if [start for start, _, _ in spans] != [0, *(stop for _, stop, _ in spans[:-1])] or spans[-1][1] != piece.of:
            raise InputError(
                f"expected pieces of {kind!r} that make the {piece.of} numbers of {name}, got"
                f" {', '.join(f'{start} to {stop}' for start, stop, _ in spans)}; the state of the 8-bit optimizer can only"
                " be resumed on as many ranks as it was saved on"
            )
        parts = [
            self.tensors.read(key).reshape(-1)[max(piece.start - start, 0) : piece.stop - start]
            for start, stop, key in spans
            if start < piece.stop and stop > piece.start
        ]
        return torch.cat(parts)
