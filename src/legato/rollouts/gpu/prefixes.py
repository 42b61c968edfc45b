"""The index of texts whose KV cache is still in the store, so that a later turn prefills only its new tokens.

The KV cache of finished responses and their prompts stays in place until the slots are needed. A prompt that shares a
prefix with one of these texts copies the KV cache of that prefix. Texts are sorted, so the longest common prefix is with
a neighbour.

A text becomes known to requests that are submitted after it was reported. Requests submitted together therefore reuse
the same prefixes, whichever of them finishes first.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.rollouts.gpu.slots import KVStore, Room

FEWEST_REUSED = 16
"""Shorter common prefixes are computed again, which is cheaper than a separate pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """Where a prefix lies: the first tokens of a prompt entry, then the first tokens of a response slot."""

    entry: int
    prompt_tokens: int
    slot: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


class PrefixIndex:
    """The texts of the store, on the host. Tokens are compared only when a prefix is looked up."""

    def __init__(self) -> None:
        self.prompts: dict[int, Tensor] = {}
        """entry -> [P]"""
        self.responses: dict[int, tuple[int, Tensor]] = {}
        """slot -> (entry of its prompt, [T] tokens whose keys and values are stored)"""
        self._later: tuple[dict[int, Tensor], dict[int, tuple[int, Tensor]]] = {}, {}
        """Prompts and responses that `settle` will make known."""
        self._sorted: list[tuple[tuple[int, ...], int, int, int]] | None = None
        """(text, how many of its tokens are in the entry, entry, slot; slot -1: the prompt alone)"""

    def clear(self) -> None:
        self.prompts.clear()
        self.responses.clear()
        self._later = {}, {}
        self._sorted = None

    def note(self, prompts: dict[int, Tensor], responses: dict[int, tuple[int, Tensor]]) -> None:
        """Add texts that the store holds."""
        self.prompts |= prompts
        self.responses |= responses
        self._sorted = None

    def note_for_later(self, prompts: dict[int, Tensor], responses: dict[int, tuple[int, Tensor]]) -> None:
        """Add texts that the store holds but that stay unknown until `settle`."""
        self._later[0].update(prompts)
        self._later[1].update(responses)

    def settle(self) -> None:
        """Make the texts of `note_for_later` known."""
        if self._later[0]:
            self.note(*self._later)
            self._later = {}, {}

    def drop(self, entries: Iterable[int], slots: Iterable[int]) -> None:
        """Remove the texts of entries and slots that are about to be overwritten."""
        overwritten, given_away = set(entries), set(slots)

        def prompts_left(prompts: dict[int, Tensor]) -> dict[int, Tensor]:
            return {entry: text for entry, text in prompts.items() if entry not in overwritten}

        def responses_left(responses: dict[int, tuple[int, Tensor]]) -> dict[int, tuple[int, Tensor]]:
            return {
                slot: (entry, text)
                for slot, (entry, text) in responses.items()
                if slot not in given_away and entry not in overwritten
            }

        self.prompts, self.responses = prompts_left(self.prompts), responses_left(self.responses)
        self._later = prompts_left(self._later[0]), responses_left(self._later[1])
        self._sorted = None

    def drop_outside(self, room: Room) -> None:
        """Remove texts that do not fit in a store of this size."""
        self.drop(
            [entry for entry in self.prompts if entry >= room.prompts],
            [slot for slot in self.responses if slot >= room.slots],
        )

    def _texts(self) -> list[tuple[tuple[int, ...], int, int, int]]:
        if self._sorted is None:
            prompts = {entry: tuple(text.tolist()) for entry, text in self.prompts.items()}
            texts = [(text, len(text), entry, -1) for entry, text in prompts.items()]
            for slot, (entry, text) in self.responses.items():
                texts.append((prompts[entry] + tuple(text.tolist()), len(prompts[entry]), entry, slot))
            self._sorted = sorted(texts)
        return self._sorted

    def longest_prefix(self, prompt: Tensor) -> StoredPrefix | None:
        """Where the longest stored prefix of a prompt lies; None if it is short. The last token is never reused: its logits
        are needed."""
        if len(prompt) <= FEWEST_REUSED or not self.prompts:
            return None
        wanted, texts = tuple(prompt[:-1].tolist()), self._texts()
        place = bisect(texts, (wanted,))
        best = max(texts[max(place - 1, 0) : place + 1], key=lambda text: _common_length(text[0], wanted))
        common, (_, own, entry, slot) = _common_length(best[0], wanted), best
        if common < FEWEST_REUSED:
            return None
        return StoredPrefix(entry=entry, prompt_tokens=min(common, own), slot=slot, response_tokens=max(0, common - own))


def _common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """The length of the common prefix, by binary search."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def copy_prefixes(store: KVStore, sources: Sequence[tuple[StoredPrefix, int]]) -> None:
    """Copy prefixes into new entries. A layer is read before it is written: an entry may be source and target."""
    if not sources:
        return
    known, places = [source for source, _ in sources], torch.tensor([entry for _, entry in sources])
    shared = _index([(one.entry, one.prompt_tokens, 0) for one in known], places, store.device)
    own = _index([(one.slot, one.response_tokens, one.prompt_tokens) for one in known], places, store.device)
    kinds = (
        (store.prompt_keys, store.keys),
        (store.prompt_values, store.values),
        (store.prompt_routes, store.routes),
    )
    for prompt_tables, slot_tables in kinds:
        for layer, table in prompt_tables.items():
            copied = [
                (index, origin[index[0], :, index[1]]) for index, origin in ((shared, table), (own, slot_tables[layer]))
            ]
            for index, values in copied:
                table[index[2], :, index[3]] = values


def _index(runs: Sequence[tuple[int, int, int]], places: Tensor, device: torch.device) -> Tensor:
    """[4, n]: source row, source column, target row, target column, from runs (row, tokens, first target column)."""
    row, count, first = torch.tensor(runs).unbind(1)
    run = torch.repeat_interleave(count)
    column = torch.arange(len(run)) - (count.cumsum(0) - count)[run]
    return torch.stack([row[run], column, places[run], first[run] + column]).to(device)


def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """A checksum of each parameter's bits, on the device; equal weights have equal checksums.

    Version counters are not enough: a fused optimizer step and a write through `.data` do not change them.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for one in parameters:
        bits = one.detach().reshape(len(one), -1) if one.dim() else one.detach().reshape(1, 1)
        rows = bits.view(kinds[one.element_size()]).sum(1, dtype=torch.int64)
        sums.append((rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum())
    return torch.stack(sums)
