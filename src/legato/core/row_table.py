"""A table beside the rows of a step that holds some of its rows only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.device import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """The entries [T, ...] of n of the B rows of a step.

    Of several processes each needs the routes of its own rows only: those of all rows would fill the memory of its GPU where
    hundreds of GPUs share a step.
    """

    values: Tensor
    """[n, T, ...]"""
    places: Tensor
    """[B] int64: where `values` has each row; n, which no index reaches, for rows that are not held."""

    @classmethod
    def whole(cls, values: Tensor) -> "RowTable":
        """The table [B, T, ...] of all rows."""
        return cls(values=values, places=torch.arange(len(values), device=values.device))

    @classmethod
    def zeros(
        cls, rows: Tensor, count: int, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> "RowTable":
        """A table of zeros [n, *shape] for some of `count` rows; `rows` are their numbers, on the CPU."""
        places = torch.full((count,), len(rows))
        places[rows] = torch.arange(len(rows))
        values = torch.zeros(len(rows), *shape, dtype=dtype, device=device)
        return cls(values=values, places=to_device(places, device))

    def part(self, rows: Tensor, width: int) -> Tensor:
        """[rows, width, ...]: the first entries of rows that are held; `rows` on the device of the table."""
        return self.values[self.places[rows], :width]

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Set the first entries of rows that are held."""
        self.values[self.places[rows], : values.shape[1]] = values
