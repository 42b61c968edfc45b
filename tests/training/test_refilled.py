"""Before the second pass, the remaining rows are merged into fewer packs, none larger than the largest was; padded rows
are not merged."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from legato.training import update

SIZES = torch.tensor([5, 3, 4, 4, 6, 2, 1, 7])
"""Tokens of rows 0 to 7."""
PACKS = [torch.tensor([7, 1]), torch.tensor([0, 3]), torch.tensor([2, 4]), torch.tensor([6, 5])]
"""10, 9, 10 and 3 tokens."""


def refill_rows(monkeypatch: pytest.MonkeyPatch, alive: set[int], *, packing: bool) -> list[list[int]]:
    """The rows of each pack after refilling with the `alive` rows."""
    rows = torch.cat(PACKS)
    monkeypatch.setattr(update, "_tokens_read", lambda policy, tables, part: int(SIZES[part].sum()))
    work: Any = object.__new__(update._Work)
    object.__setattr__(work, "policy", SimpleNamespace(packing=packing))
    object.__setattr__(work, "tables", None)
    left: Tensor = torch.tensor([row in alive for row in rows.tolist()])
    return [rows[numbers].tolist() for numbers in update._refill_micro_batches(work, rows, PACKS, left)]


def test_survivors_fill_packs_up_to_the_fullest_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refill_rows(monkeypatch, {1, 3, 4, 6, 5}, packing=True) == [[1, 3, 6, 5], [4]]


def test_packs_of_padded_rows_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refill_rows(monkeypatch, {1, 3, 4, 6, 5}, packing=False) == [[1], [3], [4], [6, 5]]


@pytest.mark.parametrize("packing", [True, False])
def test_a_micro_batch_without_rows_is_not_computed(packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refill_rows(monkeypatch, {7, 2}, packing=packing) == [[7], [2]]
    assert refill_rows(monkeypatch, set(), packing=packing) == []


def test_with_every_row_left_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refill_rows(monkeypatch, set(range(8)), packing=True) == [pack.tolist() for pack in PACKS]
