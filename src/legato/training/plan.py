"""The plan of a step: whole groups are divided into updates, updates into micro-batches, before anything is computed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.texts import Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step: which rows, in which micro-batches."""

    index: int
    """k: the number of the update within its pass over the step, from 0."""
    epoch: int
    micro_batches: tuple[Tensor, ...]
    """Row numbers of each micro-batch, which is laid out as one pack; together the rows of the update."""

    @property
    def is_first(self) -> bool:
        """Whether no update of the step has moved the policy yet."""
        return self.index == 0 and self.epoch == 0

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.micro_batches).sort().values


def plan(texts: Texts, *, updates: int, epochs: int, tokens_per_pack: int, seed: int, packing: bool) -> list[Update]:
    """The updates of a step. Groups are assigned at random, evenly to within one; an epoch uses every response once."""
    count = len(texts.prompts)
    planned = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"updates {seed} {epoch}").shuffle(order)
        for index in range(min(updates, count)):
            groups = sorted(order[index::updates])
            rows = micro_batches(texts, groups, tokens_per_pack, shared=packing)
            planned.append(Update(index=index, epoch=epoch, micro_batches=rows))
    return planned


def micro_batches(texts: Texts, groups: Sequence[int], tokens_per_pack: int, *, shared: bool = True) -> tuple[Tensor, ...]:
    """Row numbers of each micro-batch: packs of at most `tokens_per_pack` tokens; a longer row has a pack of its own.

    The number of packs is that of first-fit decreasing; then they are filled evenly. A group stays in one pack, so that its
    prompt is computed once, unless the group is larger than a pack. Not `shared` (padded rows): each row counts its own
    prompt, and rows of similar length are together.
    """
    rows = {group: (texts.group == group).nonzero().squeeze(1).tolist() for group in groups}
    prompt, response = texts.prompt_lengths.tolist(), (texts.lengths - 1).clamp(min=0).tolist()
    pieces: list[tuple[int, list[int]]] = []
    for group in groups:
        members, size = list[int](), prompt[group]
        for row in rows[group]:
            if members and (not shared or size + response[row] > tokens_per_pack):
                pieces.append((size, members))
                members, size = [], prompt[group]
            members.append(row)
            size += response[row]
        if members:
            pieces.append((size, members))
    pieces.sort(key=lambda piece: -piece[0])
    bins: list[list[int]] = []
    filled: list[int] = []
    widest: list[int] = []
    for size, members in pieces:
        # Pieces come longest first, so the first row of a bin is the width of its padded rectangle.
        costs = [f + (size if shared else w) for f, w in zip(filled, widest, strict=True)]
        place = next((i for i, cost in enumerate(costs) if cost <= tokens_per_pack), None)
        if place is None:
            bins.append(list(members))
            filled.append(size)
            widest.append(size)
        else:
            bins[place] += members
            filled[place] = costs[place]
    if shared:
        bins = _fill_evenly(pieces, len(bins), tokens_per_pack) or bins
    return tuple(torch.tensor(sorted(members)) for members in bins)


def _fill_evenly(pieces: list[tuple[int, list[int]]], count: int, most: int) -> list[list[int]] | None:
    """The pieces, largest first, each added to the emptiest of `count` packs; None if one would overflow."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for size, members in pieces:
        place = filled.index(min(filled))
        if filled[place] and filled[place] + size > most:
            return None
        bins[place] += members
        filled[place] += size
    return bins
