"""CPU decoding that stores the KV cache of a prompt once for several of its responses.

Rows are grouped into blocks of equal size, each block of one prompt. Attention over the prompt's keys is one matrix product
per block; attention over response keys is one per row. If prompts have different numbers of rows, some places stay empty.
Rows of another decoder may join later. All rows write the same column, so the keys of a row that joined start further right.
If the KV cache of an earlier turn was kept (`kept.py`), the prefill computes only the tokens after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.policy.layers.unrolled import Unrolled
from legato.policy.layout.attention import Heads, as_bias, attend
from legato.policy.layout.packs import Pack
from legato.rollouts.local.kept import KeptRows, KeptText, Tables

_MASKED_AT_ONCE = 2**24
"""Pairs of a computed prompt token and a key that are masked at once after a kept KV cache: 64 MB of float32. Otherwise one
prompt that was not kept would make the masks of all others as long as its own."""


class _Arrangement:
    """The block of each row and its place in that block. `owner` [n] is the prompt of each row, sorted."""

    def __init__(self, owner: Tensor, width: int, depth: int) -> None:
        prompts, counts = torch.unique_consecutive(owner, return_counts=True)
        sizes = torch.arange(1, int(counts.max()) + 1)
        blocks = (counts[:, None] + sizes - 1) // sizes
        # The block size that reads the fewest keys: empty places and repeated prompts both cost.
        best = int((blocks.sum(0) * (width + sizes * depth)).argmin())
        self.size = best + 1
        each = blocks[:, best]
        self.prompts = prompts.repeat_interleave(each)
        """[B]: the prompt of each block."""
        rank = torch.arange(len(owner)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        block = (each.cumsum(0) - each).repeat_interleave(counts) + rank // self.size
        self.places = block * self.size + rank % self.size
        """[n]: the index of each row among the B * size places."""
        self.full = len(owner) == len(self.prompts) * self.size

    def spread(self, values: Tensor) -> Tensor:
        """Rows [n, ...] laid out as blocks [B, size, ...]."""
        if not self.full:
            values = values.new_zeros(len(self.prompts) * self.size, *values.shape[1:]).index_copy_(0, self.places, values)
        return values.reshape(len(self.prompts), self.size, *values.shape[1:])

    def gather_rows(self, values: Tensor) -> Tensor:
        """Block places [B * size, ...] back to rows [n, ...]."""
        return values if self.full else values.index_select(0, self.places)

    def rows(self) -> Tensor:
        """[B, size]: the row of each place; an empty place has the first row of its block."""
        row_of_place = torch.full((len(self.prompts) * self.size,), -1).index_copy_(
            0, self.places, torch.arange(len(self.places))
        )
        table = row_of_place.reshape(-1, self.size)
        return torch.where(table < 0, table[:, :1], table)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reuse:
    """Which prompt tokens are computed, and where the keys and values of the others are. There are N computed tokens."""

    tokens: Tensor
    """[N]"""
    positions: Tensor
    """[N]"""
    prompt: Tensor
    """[N]: the prompt of each token."""
    place: Tensor
    """[N]: its place among the computed tokens of its prompt."""
    ends: Tensor
    """[G]: the last token of each prompt among the N."""
    last: Tensor
    """[G, S]: the last key that each computed token attends to, in tables of S tokens for each prompt."""
    sources: list[tuple[KeptRows, Tensor, Tensor]]
    """(kept rows, which of them, [n]; the prompts that begin with them, [n])"""


def _plain_heads(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Heads:
    return Heads(layer=layer, query=query, key=key, value=value, scaling=scaling, window=None, softcap=None, sinks=None)


class Blocks:
    """Decodes a wave of rows: each prompt is prefilled once, then every row decodes one token per pass."""

    def __init__(self, body: Unrolled, packed: Pack, owner: Tensor, limit: int, every: bool = False) -> None:
        self.body, self.packed, self.owner, self.limit = body, packed, owner, limit
        self.every = every
        """Whether the last layer computes all prompt tokens; recording routes needs them."""
        self.lengths, self.width = packed.prefix_lengths, packed.prefix.shape[1]
        """The length of each prompt, and the longest."""
        self.positions = packed.prefix_lengths[owner]
        self.column = 0
        """The column of the next response keys, equal for all rows."""
        self.starts: Tensor | None = None
        """[n]: the first column with a response key of each row; None: all 0."""
        self.prompts: dict[int, tuple[Tensor, ...]] = {}
        """By layer: keys and values of the blocks' prompts, [B * K, P, D]."""
        self.own: dict[int, tuple[Tensor, ...]] = {}
        """By layer: keys and values of the responses, [B, K, size, limit, D]."""
        self._reuse: _Reuse | None = None
        self._arrange()

    def _arrange(self) -> None:
        self.arrangement = _Arrangement(self.owner, self.width, (self.column + self.limit) // 2)
        unseen = torch.arange(self.width) >= self.lengths[self.arrangement.prompts, None]
        self.unseen = unseen[:, None, None] if bool(unseen.any()) else None
        """[B, 1, 1, P]: True at prompt padding; None if there is none."""
        self.block_starts = None if self.starts is None else self.arrangement.spread(self.starts)[:, None, :, None, None]
        """[B, 1, size, 1, 1]: `starts` laid out as blocks."""

    def reuse(self, kept: Sequence[tuple[KeptText, int] | None]) -> None:
        """Prefill only what follows KV caches of earlier turns: for each prompt a cache and how many tokens it covers."""
        packed = self.packed
        covered = torch.tensor([0 if one is None else one[1] for one in kept])
        prompt = torch.repeat_interleave(packed.prefix_lengths)
        computed = packed.positions >= covered[prompt]
        prompt, positions = prompt[computed], packed.positions[computed]
        counts = packed.prefix_lengths - covered
        rows: dict[KeptRows, list[tuple[int, int]]] = {}
        for number, one in enumerate(kept):
            if one is not None:
                rows.setdefault(one[0].rows, []).append((one[0].row, number))
        self._reuse = _Reuse(
            tokens=packed.tokens[computed],
            positions=positions,
            prompt=prompt,
            place=positions - covered[prompt],
            ends=counts.cumsum(0) - 1,
            last=covered[:, None] + torch.arange(int(counts.max())),
            sources=[(source, torch.tensor(pairs)[:, 0], torch.tensor(pairs)[:, 1]) for source, pairs in rows.items()],
        )

    def first(self) -> Tensor:
        """Prefill the prompts; logits [n, V] of the first token of each row."""
        if self._reuse is not None:
            reuse = self._reuse
            hidden = self.body.hidden(reuse.tokens, reuse.positions, self._resume, wanted=reuse.ends)
            self._reuse = None
            return self.body.head.exact(hidden)[self.owner]
        packed = self.packed
        ends = packed.prompt_ends
        hidden = self.body.hidden(packed.tokens, packed.positions, self._start, wanted=None if self.every else ends)
        return self.body.head.exact(hidden[ends] if self.every else hidden)[self.owner]

    def _start(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention among prompt tokens. Their keys and values go to the KV cache."""
        index = self.packed.prefix[self.arrangement.prompts]
        self.prompts[layer] = tuple(x[index].transpose(1, 2).flatten(0, 1) for x in (key, value))
        self._make_room(layer, key)
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        return self.packed.attend(_plain_heads(layer, query, key, value, scaling))[0].flatten(1)

    def _resume(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of prompt tokens that follow a kept KV cache. Both go to the KV cache of this decoder."""
        reuse = self._reuse
        assert reuse is not None
        tables = []
        for kind, new in enumerate((key, value)):
            table = new.new_zeros(len(self.lengths), new.shape[1], self.width, new.shape[2])
            for source, rows, prompts in reuse.sources:
                # Columns that the cache does not cover are overwritten next, or hidden.
                columns = source.tables[layer][kind][rows, :, : self.width]
                table[prompts, :, : columns.shape[2]] = columns
            table[reuse.prompt, :, reuse.positions] = new
            tables.append(table)
        self.prompts[layer] = tuple(table[self.arrangement.prompts].flatten(0, 1) for table in tables)
        self._make_room(layer, key)
        padded = query.new_zeros(*reuse.last.shape, *query.shape[1:])
        padded[reuse.prompt, reuse.place] = query
        padded = padded.transpose(1, 2)
        together = max(1, _MASKED_AT_ONCE // (reuse.last.shape[1] * self.width))
        attended = []
        for start in range(0, len(padded), together):
            some = slice(start, start + together)
            visible = (torch.arange(self.width) <= reuse.last[some, :, None]).unsqueeze(1)
            heads = _plain_heads(layer, padded[some], tables[0][some], tables[1][some], scaling)
            attended.append(attend(heads, heads.query, heads.key, heads.value, as_bias(visible, query)))
        return torch.cat(attended)[reuse.prompt, :, reuse.place].flatten(1)

    def _make_room(self, layer: int, like: Tensor) -> None:
        """Allocate the keys and values of the responses."""
        place = self.arrangement
        room = len(place.prompts), like.shape[1], place.size, self.limit, like.shape[2]
        self.own[layer] = like.new_zeros(room), like.new_zeros(room)

    def copy_rows(self, rows: Tensor) -> Tables:
        """Keys and values of some rows, prompt and response in one piece. Only for decoders that no other has joined."""
        assert self.starts is None
        places = self.arrangement.places[rows]
        block, inside = places // self.arrangement.size, places % self.arrangement.size
        lengths = self.lengths[self.owner[rows]]
        columns = lengths[:, None] + torch.arange(self.column)
        tables: Tables = {}
        for layer in self.own:
            pair = []
            for prompts, own in zip(self.prompts[layer], self.own[layer], strict=True):
                heads = own.shape[1]
                table = own.new_zeros(len(rows), heads, self.width + self.column, own.shape[4])
                table[:, :, : self.width] = prompts.view(-1, heads, *prompts.shape[1:])[block]
                response = own[block, :, inside, : self.column]
                table[torch.arange(len(rows))[:, None], :, columns] = response.transpose(1, 2)
                pair.append(table)
            tables[layer] = pair[0], pair[1]
        return tables

    def row_bytes(self) -> int:
        """Bytes of one row in `copy_rows`."""
        sizes = [own[0, :, 0, 0].nbytes for pair in self.own.values() for own in pair]
        return sum(sizes) * (self.width + self.column)

    def next(self, tokens: Tensor) -> Tensor:
        """Logits [n, V] after one more token of each row."""
        hidden = self.body.hidden(tokens, self.positions, self._attend)
        self.positions = self.positions + 1
        self.column += 1
        return self.body.head.exact(hidden)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of one new token per row. Its key and value are stored first."""
        place, (prompt_keys, prompt_values) = self.arrangement, self.prompts[layer]
        for store, new in zip(self.own[layer], (key, value), strict=True):
            store[:, :, :, self.column] = place.spread(new).transpose(1, 2)
        own_keys, own_values = (store.flatten(0, 2)[:, : self.column + 1] for store in self.own[layer])
        heads, width, start = key.shape[1], key.shape[2], prompt_keys.shape[1]
        # Order: block, key head, row, query head. The queries of a block for one key head are rows of one matrix.
        queries = (
            place.spread(query * scaling)
            .view(-1, place.size, heads, query.shape[1] // heads, width)
            .transpose(1, 2)
            .reshape(len(prompt_keys), -1, width)
        )
        scores = torch.bmm(queries, prompt_keys.transpose(1, 2))
        if self.unseen is not None:
            scores.view(-1, heads, *scores.shape[1:]).masked_fill_(self.unseen, -torch.inf)
        later = torch.bmm(queries.reshape(len(own_keys), -1, width), own_keys.transpose(1, 2))
        if self.block_starts is not None:
            before = torch.arange(self.column + 1) < self.block_starts
            later.view(-1, heads, place.size, *later.shape[1:]).masked_fill_(before, -torch.inf)
        weights = torch.cat([scores, later.reshape(*scores.shape[:2], -1)], 2).softmax(2)
        output = torch.bmm(weights[:, :, :start], prompt_values)
        output.view(len(own_keys), -1, width).baddbmm_(weights[:, :, start:].reshape(*later.shape), own_values)
        back = output.reshape(-1, heads, place.size, output.shape[1] // place.size * width).transpose(1, 2)
        return place.gather_rows(back.flatten(0, 1).flatten(1))

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows and lay out the remaining ones again."""
        before = self.arrangement
        self.owner, self.positions = self.owner[rows], self.positions[rows]
        first = 0
        if self.starts is not None:
            first = int(self.starts[rows].min())
            starts = self.starts[rows] - first
            self.starts = starts if bool(starts.any()) else None
        self._arrange()
        source = before.places[rows][self.arrangement.rows()]
        block, inside = source // before.size, source % before.size
        for layer in self.own:
            self.prompts[layer] = tuple(
                table.view(len(before.prompts), -1, *table.shape[1:])[block[:, 0]].flatten(0, 1)
                for table in self.prompts[layer]
            )
            self.own[layer] = tuple(self._move(table, block, inside, first) for table in self.own[layer])
        self.column -= first

    def _move(self, table: Tensor, block: Tensor, inside: Tensor, first: int) -> Tensor:
        """The written columns of a table from `first` on, copied into the new arrangement."""
        columns = table[:, :, :, first : self.column].transpose(1, 2)[block, inside].transpose(1, 2)
        new = table.new_zeros(*columns.shape[:3], *table.shape[3:])
        new[:, :, :, : self.column - first] = columns
        return new

    def join(self, other: "Blocks") -> None:
        """Add the rows of another decoder and lay out all rows again."""
        parts = (self, other)
        used = [(part, part._used_prompts()) for part in parts]
        lengths = torch.cat([part.lengths[prompts] for part, (prompts, _) in used])
        tokens = [part.column - part._starts() for part in parts]
        column = max(int(counts.max()) for counts in tokens)
        room = column + max(part.limit - part.column for part in parts)
        width = int(lengths.max())
        prompt_tables = {
            layer: [
                torch.cat([part._prompt_table(layer, kind, blocks, width) for part, (_, blocks) in used]) for kind in (0, 1)
            ]
            for layer in self.own
        }
        own_rows = {
            layer: [torch.cat([part._own_rows(layer, kind, column, room) for part in parts]) for kind in (0, 1)]
            for layer in self.own
        }
        owners = [torch.searchsorted(prompts, part.owner) for part, (prompts, _) in used]
        self.owner = torch.cat([owners[0], owners[1] + len(used[0][1][0])])
        self.positions = torch.cat([part.positions for part in parts])
        starts = column - torch.cat(tokens)
        self.starts = starts if bool(starts.any()) else None
        self.lengths, self.width, self.column, self.limit = lengths, width, column, room
        self._arrange()
        for layer in self.own:
            self.prompts[layer] = tuple(table[self.arrangement.prompts].flatten(0, 1) for table in prompt_tables[layer])
            self.own[layer] = tuple(self.arrangement.spread(rows).transpose(1, 2).contiguous() for rows in own_rows[layer])

    def _used_prompts(self) -> tuple[Tensor, Tensor]:
        """The prompts that still have rows, and the first block of each."""
        prompts, counts = torch.unique_consecutive(self.arrangement.prompts, return_counts=True)
        return prompts, counts.cumsum(0) - counts

    def _starts(self) -> Tensor:
        """[n]: the first column with a response key of each row."""
        return torch.zeros_like(self.owner) if self.starts is None else self.starts

    def _prompt_table(self, layer: int, kind: int, blocks: Tensor, width: int) -> Tensor:
        """[len(blocks), K, width, D]: keys (kind 0) or values (1) of the prompts of some blocks."""
        table = self.prompts[layer][kind]
        table = table.view(len(self.arrangement.prompts), -1, *table.shape[1:])[blocks]
        missing = width - table.shape[2]
        return torch.nn.functional.pad(table, (0, 0, 0, missing)) if missing > 0 else table[:, :, :width]

    def _own_rows(self, layer: int, kind: int, column: int, room: int) -> Tensor:
        """[n, K, room, D]: keys (kind 0) or values (1) of the responses, moved so that the last is before `column`."""
        table = self.own[layer][kind]
        rows = self.arrangement.gather_rows(table.transpose(1, 2).flatten(0, 1))
        length = min(self.column, column)
        moved = rows.new_zeros(len(rows), rows.shape[1], room, rows.shape[3])
        moved[:, :, column - length : column] = rows[:, :, self.column - length : self.column]
        return moved
