"""The KV cache of the GPU engine, and the decoding state of each response.

A response has a *slot*; responses of one prompt share the prompt's keys and values (an *entry*). One extra slot is the dump:
rows that only fill up a bucket write there. All tensors keep their address until the store grows, so that captured graphs
stay valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from legato.core.device import to_device
from legato.policy.experts.routers import Routers
from legato.rollouts.sampling import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The size of a store."""

    slots: int
    prompts: int
    prompt_tokens: int
    response_tokens: int

    def holds(self, other: "Room") -> bool:
        return all(getattr(self, field.name) >= getattr(other, field.name) for field in fields(self))

    def union(self, other: "Room") -> "Room":
        """The smallest room that holds both."""
        return Room(**{field.name: max(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)})

    def within(self, slots: int) -> "Room":
        """The room with at most `slots` slots; a prompt without a slot needs no entry."""
        slots = min(self.slots, slots)
        return Room(
            slots=slots,
            prompts=min(self.prompts, slots),
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
        )

    @property
    def tokens(self) -> int:
        """How many tokens the KV cache holds, the dump included."""
        return (self.slots + 1) * self.response_tokens + self.prompts * self.prompt_tokens


Tables = dict[int, Tensor]
"""layer -> [entries or slots, key heads, columns, width]"""


class KVStore:
    """The KV cache per layer, allocated when a layer first runs, and the state of every slot."""

    def __init__(self, room: Room, device: torch.device, routers: Routers | None = None) -> None:
        self.device, self.routers = device, routers
        """The routers whose routes are recorded; None: no routes."""
        self.prompt_keys: Tables = {}
        self.prompt_values: Tables = {}
        self.keys: Tables = {}
        self.values: Tables = {}
        self.prompt_routes: Tables = {}
        self.routes: Tables = {}
        """router -> [entries or slots, 1, columns, K]: the experts of the token whose key is in that column."""
        for number in range(0 if routers is None else len(routers.modules)):
            assert routers is not None
            self.prompt_routes[number], self.routes[number] = (
                torch.zeros(rows, 1, columns, routers.active, dtype=routers.index, device=device)
                for rows, columns in ((room.prompts, room.prompt_tokens), (room.slots + 1, room.response_tokens))
            )
        self._reset_slots(room)

    def _reset_slots(self, room: Room) -> None:
        self.room, count, device = room, room.slots + 1, self.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.ending: Tensor | None = None
        """[prompts, N]: the last hidden state of each prompt, for responses that start later than its first."""
        self.prompt_length = zeros(room.prompts)
        self.length = zeros(count)
        """Response tokens whose keys and values are stored."""
        self.base = zeros(count)
        """The prompt's length: the position of the first response token."""
        self.token = zeros(count)
        """The token that the next step reads."""
        self.seed = zeros(count)
        self.sampled_count = zeros(count)
        """How many response tokens have been sampled."""
        self.limit = zeros(count)
        """The largest number of response tokens."""
        self.done = torch.ones(count, dtype=torch.bool, device=device)
        self.tokens = zeros(count, room.response_tokens)
        self.logprobs = torch.zeros(count, room.response_tokens, dtype=torch.float32, device=device)
        self.kept_logmass = torch.zeros(count, room.response_tokens, dtype=torch.float32, device=device)

    @property
    def dump(self) -> int:
        return self.room.slots

    def _kv_tables(self, room: Room) -> tuple[tuple[Tables, int, int], ...]:
        """The tables of keys and values, each with its number of rows and columns."""
        return (
            (self.prompt_keys, room.prompts, room.prompt_tokens),
            (self.prompt_values, room.prompts, room.prompt_tokens),
            (self.keys, room.slots + 1, room.response_tokens),
            (self.values, room.slots + 1, room.response_tokens),
        )

    def _route_tables(self, room: Room) -> tuple[tuple[Tables, int, int], ...]:
        return (
            (self.prompt_routes, room.prompts, room.prompt_tokens),
            (self.routes, room.slots + 1, room.response_tokens),
        )

    def make_tables(self, layer: int, keys: Tensor) -> None:
        """Allocate the KV tables of a layer that runs for the first time, for keys [N, K, D]."""
        _, key_heads, width = keys.shape
        for tables, rows, columns in self._kv_tables(self.room):
            if layer not in tables:
                tables[layer] = keys.new_zeros(rows, key_heads, columns, width)

    def grow(self, room: Room) -> None:
        """Resize and keep the KV cache. Table by table, so that old and new never exist in full together."""
        for tables, rows, columns in (*self._kv_tables(room), *self._route_tables(room)):
            for layer in list(tables):
                old = tables[layer]
                new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
                rows_kept, columns_kept = min(rows, len(old)), min(columns, old.shape[2])
                new[:rows_kept, :, :columns_kept] = old[:rows_kept, :, :columns_kept]
                tables[layer] = new
                del old
        self._reset_slots(room)

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of keys, values and routes over all layers; None before the first pass."""
        sizes = [
            table[0, :, 0].numel() * table.element_size()
            for tables in (self.keys, self.values, self.routes)
            for table in tables.values()
        ]
        return sum(sizes) if self.keys else None

    def keep_ending(self, hidden: Tensor, entries: Tensor) -> None:
        """Store the last hidden state of prompts."""
        if self.ending is None:
            self.ending = hidden.new_zeros(self.room.prompts, hidden.shape[1])
        self.ending[entries] = hidden

    def admit(self, slots: Tensor, lengths: Tensor, seeds: Tensor, limits: Tensor) -> None:
        """Assign slots to new responses. All are [n]; `lengths` are of prompts, `limits` the most response tokens."""
        self.base[slots], self.seed[slots], self.limit[slots] = lengths, seeds, limits
        # index_fill_ instead of assignment: an assigned number is copied to the device, and the host would wait for it.
        for table, value in ((self.length, 0), (self.sampled_count, 0), (self.done, False)):
            table.index_fill_(0, slots, value)

    def write(self, slots: Tensor, place: Tensor, alive: Tensor, choice: Choice, ends: Tensor) -> None:
        """Store the sampled tokens of rows that still decode, and mark those that end."""
        tokens = choice.tokens
        self.tokens[slots, place] = torch.where(alive, tokens, self.tokens[slots, place])
        self.logprobs[slots, place] = torch.where(alive, choice.logprobs, self.logprobs[slots, place])
        if choice.kept_logmass is not None:
            self.kept_logmass[slots, place] = torch.where(
                alive, choice.kept_logmass.float(), self.kept_logmass[slots, place]
            )
        self.token[slots] = torch.where(alive, tokens, self.token[slots])
        sampled_count = torch.where(alive, place + 1, self.sampled_count[slots])
        self.sampled_count[slots] = sampled_count
        ended = (tokens.unsqueeze(1) == ends).any(1) | (sampled_count >= self.limit[slots])
        self.done[slots] = ~alive | ended


def device_ints(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Integers as an int64 tensor on the device, copied from pinned memory so that the host does not wait."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def group_by_prompt(prompts: list[int], per_block: int, count: int) -> tuple[list[int], list[list[int]]]:
    """Group rows by prompt into `count` blocks of at most `per_block`: (prompt of each block, its rows), padded with -1."""
    members: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if prompt >= 0:
            members.setdefault(prompt, []).append(row)
    owners, rows = [], []
    for prompt, listed in members.items():
        for start in range(0, len(listed), per_block):
            part = listed[start : start + per_block]
            owners.append(prompt)
            rows.append(part + [-1] * (per_block - len(part)))
    missing = count - len(owners)
    assert missing >= 0, "more blocks than rows"
    return owners + [-1] * missing, rows + [[-1] * per_block] * missing
