"""Decoding through the model's own forward, with a KV cache per response."""

import torch
from torch import Tensor

from legato.policy.head.head import Head
from legato.policy.layout.attention import Heads, as_bias, attend
from legato.policy.layout.packs import Pack
from legato.policy.policy import Policy


class _Prefill:
    """The view of a pack that copies each layer's keys and values into a KV cache."""

    def __init__(self, packed: Pack, cache: "_Cache", rows: Tensor) -> None:
        self.packed, self.cache, self.rows = packed, cache, rows

    def attend(self, heads: Heads) -> Tensor:
        self.cache.start(heads, self.packed, self.rows)
        return self.packed.attend(heads)


class _Cache:
    """KV cache `[rows, heads, columns, width]` per layer. Prompts end at column P - 1; all rows write the same column."""

    def __init__(self, prompt_lengths: Tensor, width: int, capacity: int) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.width, self.capacity, self.column = width, capacity, width
        self.first = width - prompt_lengths
        self._biases: dict[int | None, Tensor | None] = {}
        self._even = bool((self.first == 0).all())

    def start(self, heads: Heads, packed: Pack, rows: Tensor) -> None:
        """Copy the prompts' keys and values to their rows, right-aligned."""
        columns = torch.arange(self.width, device=rows.device)
        shifted = (columns - self.first[:, None]).clamp(min=0)
        index = packed.prefix[rows].gather(1, shifted)
        for store, source in ((self.keys, heads.key), (self.values, heads.value)):
            prompt_table = source[0].transpose(0, 1)[index].transpose(1, 2)
            table = prompt_table.new_empty(len(rows), prompt_table.shape[1], self.capacity, prompt_table.shape[3])
            table[:, :, : self.width] = prompt_table
            store[heads.layer] = table

    def attend(self, heads: Heads) -> Tensor:
        keys, values = self.keys[heads.layer], self.values[heads.layer]
        keys[:, :, self.column] = heads.key[:, :, 0]
        values[:, :, self.column] = heads.value[:, :, 0]
        end = self.column + 1
        bias = self._bias(heads.window, heads.query)
        return attend(heads, heads.query, keys[:, :, :end], values[:, :, :end], bias).transpose(1, 2)

    def _bias(self, window: int | None, like: Tensor) -> Tensor | None:
        """The attention bias of the new token; None if all prompts have one length and there is no window."""
        if self._even and window is None:
            return None
        if window not in self._biases:
            columns = torch.arange(self.column + 1, device=like.device)
            visible = columns >= self.first[:, None]
            if window is not None:
                visible = visible & (columns > self.column - window)
            self._biases[window] = as_bias(visible[:, None, None, :], like)
        return self._biases[window]

    def advance(self) -> None:
        self.column += 1
        self._biases.clear()

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.first = self.first[rows]
        self._biases.clear()
        for store in (self.keys, self.values):
            for layer, table in store.items():
                store[layer] = table.index_select(0, rows)

    def join(self, other: "_Cache") -> None:
        """Add the rows of another cache. All rows end at the same column, which is as far left as the longest row allows."""
        parts = (self, other)
        column = max(int((part.column - part.first).max()) for part in parts)
        capacity = column + max(part.capacity - part.column for part in parts)
        for mine, others in ((self.keys, other.keys), (self.values, other.values)):
            for layer, table in mine.items():
                rows, heads, width = len(table) + len(others[layer]), table.shape[1], table.shape[3]
                joined, start = table.new_zeros(rows, heads, capacity, width), 0
                for part, source in ((self, table), (other, others[layer])):
                    length = min(part.column, column)
                    joined[start : start + len(source), :, column - length : column] = source[
                        :, :, part.column - length : part.column
                    ]
                    start += len(source)
                mine[layer] = joined
        self.first = torch.cat([part.first + (column - part.column) for part in parts])
        self.column, self.capacity = column, capacity
        self._even = bool((self.first == 0).all())
        self._biases.clear()


class Cached:
    """Decodes a wave through the model's own forward with a KV cache."""

    def __init__(self, policy: Policy, packed: Pack, owner: Tensor, limit: int) -> None:
        self.policy, self.packed, self.owner = policy, packed, owner
        lengths = packed.prefix_lengths[owner]
        self.cache = _Cache(lengths, packed.prefix.shape[1], packed.prefix.shape[1] + limit)
        self.positions = lengths.clone()
        self.head = Head.from_body(policy.body)

    def first(self) -> Tensor:
        """Prefill each prompt once; logits [n, V] of the first token of each row."""
        packed = self.packed
        with self.policy.attending(_Prefill(packed, self.cache, self.owner)):
            hidden = self.policy.hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]
        return self.head.exact(hidden[packed.prompt_ends])[self.owner]

    def next(self, tokens: Tensor) -> Tensor:
        """Logits [n, V] after one more token of each row."""
        with self.policy.attending(self.cache):
            hidden = self.policy.hidden(tokens.unsqueeze(1), self.positions.unsqueeze(1))[:, 0]
        self.positions = self.positions + 1
        self.cache.advance()
        return self.head.exact(hidden)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
        self.positions = self.positions[rows]

    def join(self, other: "Cached") -> None:
        """Add the rows of another decoder."""
        self.cache.join(other.cache)
        self.positions = torch.cat([self.positions, other.positions])
