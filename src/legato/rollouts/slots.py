"""The memory of the GPU engine: keys and values of prompts and of responses, and what each response is at.

A response has a *slot*; responses of one prompt share the prompt's keys and values. One slot more than asked for is a dump:
rows that only fill up a bucket write there. All tensors keep their address for as long as the store lives, so that captured
graphs stay right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.policy.attention import Heads
from legato.policy.packs import Pack
from legato.rollouts.sampling import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much fits."""

    slots: int
    prompts: int
    prompt_tokens: int
    response_tokens: int

    def holds(self, other: "Room") -> bool:
        names = ("slots", "prompts", "prompt_tokens", "response_tokens")
        return all(getattr(self, name) >= getattr(other, name) for name in names)


class Store:
    """Keys and values per layer, made when a layer first shows its shape, and the state of every slot."""

    def __init__(self, room: Room, device: torch.device) -> None:
        self.room, self.device = room, device
        self.prompt_keys: dict[int, Tensor] = {}
        self.prompt_values: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        count = room.slots + 1

        def whole(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.prompt_length = whole(room.prompts)
        self.prompt = whole(count)
        """[slots]: the prompt of each."""
        self.length = whole(count)
        """Response tokens whose keys and values are stored."""
        self.base = whole(count)
        """The prompt's length: the position of the first response token."""
        self.token = whole(count)
        """The token to be read next."""
        self.seed = whole(count)
        self.written = whole(count)
        """Response tokens chosen."""
        self.limit = whole(count)
        """The most a response may have."""
        self.done = torch.ones(count, dtype=torch.bool, device=device)
        self.tokens = whole(count, room.response_tokens)
        self.logprobs = torch.zeros(count, room.response_tokens, dtype=torch.float32, device=device)
        self.kept = torch.zeros(count, room.response_tokens, dtype=torch.float32, device=device)

    @property
    def dump(self) -> int:
        return self.room.slots

    def _tables(self, heads: Heads) -> None:
        if heads.layer in self.keys:
            return
        _, key_heads, _, width = heads.key.shape
        room = self.room
        for store, count, columns in (
            (self.prompt_keys, room.prompts, room.prompt_tokens),
            (self.prompt_values, room.prompts, room.prompt_tokens),
            (self.keys, room.slots + 1, room.response_tokens),
            (self.values, room.slots + 1, room.response_tokens),
        ):
            store[heads.layer] = heads.key.new_zeros(count, key_heads, columns, width)

    def keep_prompts(self, heads: Heads, packed: Pack, entries: Tensor) -> None:
        """Store a prefilled pack's keys and values as the given prompt entries."""
        self._tables(heads)
        columns = packed.prefix.shape[1]
        for store, source in ((self.prompt_keys, heads.key), (self.prompt_values, heads.value)):
            found = source[0].transpose(0, 1)[packed.prefix].transpose(1, 2)
            store[heads.layer][entries, :, :columns] = found

    def admit(self, slots: Tensor, prompts: Tensor, lengths: Tensor, seeds: Tensor, limit: int) -> None:
        """Give slots to responses that have not begun."""
        self.prompt[slots], self.base[slots], self.seed[slots] = prompts, lengths, seeds
        self.length[slots], self.written[slots], self.limit[slots] = 0, 0, limit
        self.done[slots] = False

    def write(self, slots: Tensor, place: Tensor, alive: Tensor, choice: Choice, ends: Tensor) -> None:
        """Note what was chosen for the rows still writing, and which of them end with it."""
        tokens = choice.tokens
        self.tokens[slots, place] = torch.where(alive, tokens, self.tokens[slots, place])
        self.logprobs[slots, place] = torch.where(alive, choice.logprobs, self.logprobs[slots, place])
        if choice.kept_logmass is not None:
            self.kept[slots, place] = torch.where(alive, choice.kept_logmass.float(), self.kept[slots, place])
        self.token[slots] = torch.where(alive, tokens, self.token[slots])
        written = torch.where(alive, place + 1, self.written[slots])
        self.written[slots] = written
        ended = (tokens.unsqueeze(1) == ends).any(1) | (written >= self.limit[slots])
        self.done[slots] = ~alive | ended


class Prefill:
    """The view of a pack of prompts that also fills the store."""

    def __init__(self, store: Store, packed: Pack, entries: Tensor) -> None:
        self.store, self.packed, self.entries = store, packed, entries

    def attend(self, heads: Heads) -> Tensor:
        self.store.keep_prompts(heads, self.packed, self.entries)
        return self.packed.attend(heads)


def blocks(prompts: list[int], per_block: int, count: int) -> tuple[list[int], list[list[int]]]:
    """Rows grouped by prompt into `count` blocks of at most `per_block`: (prompt of each block, its rows), -1 where none."""
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
