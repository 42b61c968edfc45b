"""CPU decoding that stores the KV cache of a prompt once for several of its responses.

Rows are grouped into blocks of equal size, each block of one prompt. Attention over the prompt's keys is one matrix product
per block; attention over response keys is one per row. If prompts have different numbers of rows, some places stay empty.
"""

import torch
from torch import Tensor

from legato.policy.layers.unrolled import Unrolled
from legato.policy.layout.attention import Heads
from legato.policy.layout.packs import Pack


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


class Blocks:
    """Decodes a wave of rows: each prompt is prefilled once, then every row decodes one token per pass."""

    def __init__(self, body: Unrolled, packed: Pack, owner: Tensor, limit: int, every: bool = False) -> None:
        self.body, self.packed, self.owner, self.limit = body, packed, owner, limit
        self.every = every
        """Whether the last layer computes all prompt tokens; recording routes needs them."""
        self.positions = packed.prefix_lengths[owner]
        self.column = 0
        """The column of the next response keys, equal for all rows."""
        self.prompts: dict[int, tuple[Tensor, ...]] = {}
        """By layer: keys and values of the blocks' prompts, [B * K, P, D]."""
        self.own: dict[int, tuple[Tensor, ...]] = {}
        """By layer: keys and values of the responses, [B, K, size, limit, D]."""
        self._arrange()

    def _arrange(self) -> None:
        lengths, width = self.packed.prefix_lengths, self.packed.prefix.shape[1]
        self.arrangement = _Arrangement(self.owner, width, (self.column + self.limit) // 2)
        unseen = torch.arange(width) >= lengths[self.arrangement.prompts, None]
        self.unseen = unseen[:, None, None] if bool(unseen.any()) else None
        """[B, 1, 1, P]: True at prompt padding; None if there is none."""

    def first(self) -> Tensor:
        """Prefill the prompts; logits [n, V] of the first token of each row."""
        packed = self.packed
        ends = packed.prompt_ends
        hidden = self.body.hidden(packed.tokens, packed.positions, self._start, wanted=None if self.every else ends)
        return self.body.head.exact(hidden[ends] if self.every else hidden)[self.owner]

    def _start(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention among prompt tokens. Their keys and values go to the KV cache."""
        index = self.packed.prefix[self.arrangement.prompts]
        self.prompts[layer] = tuple(x[index].transpose(1, 2).flatten(0, 1) for x in (key, value))
        room = len(index), key.shape[1], self.arrangement.size, self.limit, key.shape[2]
        self.own[layer] = key.new_zeros(room), key.new_zeros(room)
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        heads = Heads(layer=layer, query=query, key=key, value=value, scaling=scaling, window=None, softcap=None, sinks=None)
        return self.packed.attend(heads)[0].flatten(1)

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
        weights = torch.cat([scores, later.reshape(*scores.shape[:2], -1)], 2).softmax(2)
        output = torch.bmm(weights[:, :, :start], prompt_values)
        output.view(len(own_keys), -1, width).baddbmm_(weights[:, :, start:].reshape(*later.shape), own_values)
        back = output.reshape(-1, heads, place.size, output.shape[1] // place.size * width).transpose(1, 2)
        return place.gather_rows(back.flatten(0, 1).flatten(1))

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows and lay out the remaining ones again."""
        before = self.arrangement
        self.owner, self.positions = self.owner[rows], self.positions[rows]
        self._arrange()
        source = before.places[rows][self.arrangement.rows()]
        block, inside = source // before.size, source % before.size
        for layer in self.own:
            self.prompts[layer] = tuple(
                table.view(len(before.prompts), -1, *table.shape[1:])[block[:, 0]].flatten(0, 1)
                for table in self.prompts[layer]
            )
            self.own[layer] = tuple(self._move(table, block, inside) for table in self.own[layer])

    def _move(self, table: Tensor, block: Tensor, inside: Tensor) -> Tensor:
        """The written columns of a table, copied into the new arrangement."""
        columns = table[:, :, :, : self.column].transpose(1, 2)[block, inside].transpose(1, 2)
        new = table.new_zeros(*columns.shape[:3], *table.shape[3:])
        new[:, :, :, : self.column] = columns
        return new
