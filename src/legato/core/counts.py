"""The normalising counts of an update, computed once over the whole update before it is split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from legato.errors import InputError


def _add_tables(left: Tensor, right: Tensor) -> Tensor:
    size = max(len(left), len(right))
    return pad(left, (0, size - len(left))) + pad(right, (0, size - len(right)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Tokens and sequences, and tokens per group where groups matter. float64, so that adding never rounds."""

    tokens: Tensor
    sequences: Tensor
    """Rollouts with at least one token, also those that are clipped, filtered or have advantage 0."""
    group_tokens: Tensor | None = None
    """[groups]; the number of groups is the number of its nonzero entries, which only the whole update knows."""

    def __add__(self, other: Tally) -> Tally:
        mine, others = self.group_tokens, other.group_tokens
        return Tally(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            group_tokens=None if mine is None or others is None else _add_tables(mine, others),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Additive over micro-batches and ranks: the sum over the parts of an update is the count of the update."""

    all: Tally
    kept: Tally | None = None
    """The tally of what filters and rejection kept; only there if an aggregate has `denominator = "kept"`."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-group sums over anchor-side tensors, for parts of group scope."""

    def __add__(self, other: Counts) -> Counts:
        if not isinstance(other, Counts):
            return NotImplemented
        if not self.fits(other):
            raise InputError("these counts were made for different algorithms and cannot be added")
        kept = None if self.kept is None or other.kept is None else self.kept + other.kept
        tables = {name: _add_tables(table, other.tables[name]) for name, table in self.tables.items()}
        return Counts(all=self.all + other.all, kept=kept, tables=tables)

    def __radd__(self, other: int) -> Counts:
        """So that the built-in sum() works."""
        return self if other == 0 else NotImplemented

    def tally(self, denominator: str) -> Tally:
        """The tally for a `denominator`, 'all' or 'kept'."""
        if denominator == "all":
            return self.all
        assert self.kept is not None, "checked before"
        return self.kept

    def equals(self, other: Counts) -> bool:
        """Whether both have equal counts. This waits for the device, so only the public functions call it."""
        return self.fits(other) and all(
            left is right or (left is not None and right is not None and torch.equal(left, right))
            for left, right in zip(self._tensors(), other._tensors(), strict=True)
        )

    def fits(self, other: Counts) -> bool:
        """Whether both hold the same kinds of counts, so that they can be added."""
        return self._kinds() == other._kinds()

    def _kinds(self) -> tuple[bool, bool, tuple[str, ...]]:
        return self.all.group_tokens is not None, self.kept is not None, tuple(sorted(self.tables))

    def _tensors(self) -> list[Tensor | None]:
        tensors: list[Tensor | None] = []
        for tally in (self.all, self.kept):
            tensors += [None] * 3 if tally is None else [tally.tokens, tally.sequences, tally.group_tokens]
        return tensors + [self.tables[name] for name in sorted(self.tables)]
