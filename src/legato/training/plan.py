"""The plan of a step: whole groups are divided into updates, updates into micro-batches, before anything is computed.

With several ranks the micro-batches of an update are dealt to them by tokens. Which groups an update has does not depend on
the number of ranks; how its rows lie in packs does, and changes no result but for rounding.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.texts import Texts

CUTS = (1, 2, 4, 8)
"""Into how many pieces a group may be cut so that ranks get equal shares; each piece computes the prompt again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step: which rows, in which micro-batches."""

    index: int
    """k: the number of the update within its pass over the step, from 0."""
    epoch: int
    micro_batches: tuple[Tensor, ...]
    """Row numbers of each micro-batch, which is laid out as one pack; together the rows of the update."""
    owners: tuple[int, ...] = ()
    """The rank that computes each micro-batch; empty: there is one rank."""

    @property
    def is_first(self) -> bool:
        """Whether no update of the step has moved the policy yet."""
        return self.index == 0 and self.epoch == 0

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.micro_batches).sort().values

    def share(self, rank: int) -> list[Tensor]:
        """The micro-batches that a rank computes; it may have none."""
        if not self.owners:
            return list(self.micro_batches)
        return [rows for rows, owner in zip(self.micro_batches, self.owners, strict=True) if owner == rank]


def plan(
    texts: Texts,
    *,
    updates: int,
    epochs: int,
    tokens_per_pack: int,
    seed: int,
    packing: bool,
    ranks: int = 1,
    silent: Tensor | None = None,
) -> list[Update]:
    """The updates of a step. Groups are assigned at random, evenly to within one; an epoch uses every response once.

    `silent` [B] marks rows that will be left out: they cost a rank nothing.
    """
    count = texts.problems
    planned = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"updates {seed} {epoch}").shuffle(order)
        for index in range(min(updates, count)):
            # Rows that are compared with each other stay together, whatever their prompts.
            groups = sorted(prompt for problem in order[index::updates] for prompt in texts.prompts_of(problem))
            owners: tuple[int, ...] = ()
            if ranks == 1:
                batches = micro_batches(texts, groups, tokens_per_pack, shared=packing)
            else:
                shares = deal(texts, groups, tokens_per_pack, ranks, shared=packing, silent=silent)
                batches = tuple([rows for share in shares for rows in share])
                owners = tuple([rank for rank, share in enumerate(shares) for _ in share])
            planned.append(Update(index=index, epoch=epoch, micro_batches=batches, owners=owners))
    return planned


def micro_batches(texts: Texts, groups: Sequence[int], tokens_per_pack: int, *, shared: bool = True) -> tuple[Tensor, ...]:
    """Row numbers of each micro-batch: packs of at most `tokens_per_pack` tokens; a longer row has a pack of its own.

    The number of packs is that of first-fit decreasing; then they are filled evenly. A group stays in one pack, so that its
    prompt is computed once, unless the group is larger than a pack. Not `shared` (padded rows): each row counts its own
    prompt, and rows of similar length are together.
    """
    sizes = _Sizes(texts, shared=shared)
    return _fill_packs([piece for group in groups for piece in sizes.cut(group, tokens_per_pack)], tokens_per_pack, shared)


def deal(
    texts: Texts,
    groups: Sequence[int],
    tokens_per_pack: int,
    ranks: int,
    *,
    shared: bool = True,
    silent: Tensor | None = None,
) -> list[tuple[Tensor, ...]]:
    """The micro-batches of each rank. Groups go to the rank with the fewest tokens so far, the largest group first.

    Groups are cut into pieces where that makes the largest share smaller.
    """
    sizes = _Sizes(texts, shared=shared, silent=silent)
    dealt = [_deal(sizes, groups, tokens_per_pack, ranks, cuts) for cuts in CUTS]
    _, shares = min(dealt, key=lambda each: each[0])
    return [_fill_packs(pieces, tokens_per_pack, shared) if pieces else () for pieces in shares]


Piece = tuple[int, list[int]]
"""Tokens, and the rows of one group that lie together in a pack."""


class _Sizes:
    """The tokens of pieces of groups."""

    def __init__(self, texts: Texts, *, shared: bool, silent: Tensor | None = None) -> None:
        self.shared = shared
        self.prompt, self.response = texts.prompt_lengths.tolist(), (texts.lengths - 1).clamp(min=0).tolist()
        self.silent = [False] * len(texts) if silent is None else silent.tolist()
        self.rows: dict[int, list[int]] = {}
        for row, group in enumerate(texts.group.tolist()):
            self.rows.setdefault(group, []).append(row)

    def cut(self, group: int, most: int) -> list[Piece]:
        """The rows of a group in pieces of at most `most` tokens, at least one row each."""
        pieces, members, size = list[Piece](), list[int](), self.prompt[group]
        for row in self.rows[group]:
            if members and (not self.shared or size + self.response[row] > most):
                pieces.append((size, members))
                members, size = [], self.prompt[group]
            members.append(row)
            size += self.response[row]
        if members:
            pieces.append((size, members))
        return pieces

    def cost(self, group: int, piece: Piece) -> int:
        """The tokens of a piece that are computed."""
        alive = [row for row in piece[1] if not self.silent[row]]
        return self.prompt[group] + sum([self.response[row] for row in alive]) if alive else 0


def _deal(
    sizes: _Sizes, groups: Sequence[int], tokens_per_pack: int, ranks: int, cuts: int
) -> tuple[int, list[list[Piece]]]:
    """The tokens of the largest share, and the pieces of each rank, with groups cut into about so many pieces."""
    costs: list[tuple[int, Piece]] = []
    for group in groups:
        whole = sizes.prompt[group] + sum([sizes.response[row] for row in sizes.rows[group]])
        # Each piece has the prompt again.
        most = sizes.prompt[group] + -(-(whole - sizes.prompt[group]) // cuts)
        costs += [(sizes.cost(group, piece), piece) for piece in sizes.cut(group, min(most, tokens_per_pack))]
    costs.sort(key=lambda each: -each[0])
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for cost, piece in costs:
        # Silent pieces cost nothing, so the number of pieces decides where they go.
        rank = min(range(ranks), key=lambda each: (loads[each], len(shares[each])))
        shares[rank].append(piece)
        loads[rank] += cost
    return max(loads), shares


def _fill_packs(pieces: list[Piece], tokens_per_pack: int, shared: bool) -> tuple[Tensor, ...]:
    """The rows of each pack that these pieces make."""
    pieces = sorted(pieces, key=lambda piece: -piece[0])
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


def _fill_evenly(pieces: list[Piece], count: int, most: int) -> list[list[int]] | None:
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
