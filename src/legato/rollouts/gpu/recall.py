"""Which texts the store still holds, so that a later turn reads only what is new.

When responses have finished, their keys and values and those of their prompts stay where they were until others need the
room. A prompt that begins as one of these texts does takes over what is common. Texts are sorted: the one with the longest
common beginning is a neighbour.

A text is known to requests that are submitted after it was reported. Requests submitted together read alike, whichever of
them finishes first.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.rollouts.gpu.slots import Room, Store

WORTH = 16
"""Fewer tokens in common are read again: that is cheaper than a pass of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a beginning lies: so many tokens of a prompt's entry, then so many of a response's slot."""

    entry: int
    prompt_tokens: int
    slot: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


class Recall:
    """The texts of the store, on the host. Their numbers are only looked at when somebody asks."""

    def __init__(self) -> None:
        self.prompts: dict[int, Tensor] = {}
        """entry -> [P]"""
        self.responses: dict[int, tuple[int, Tensor]] = {}
        """slot -> (entry of its prompt, [T] tokens whose keys and values are stored)"""
        self._later: tuple[dict[int, Tensor], dict[int, tuple[int, Tensor]]] = {}, {}
        """The same of texts that are not known yet."""
        self._sorted: list[tuple[tuple[int, ...], int, int, int]] | None = None
        """(text, tokens of it in the entry, entry, slot; -1: the prompt alone)"""

    def clear(self) -> None:
        self.prompts.clear()
        self.responses.clear()
        self._later = {}, {}
        self._sorted = None

    def note(self, prompts: dict[int, Tensor], responses: dict[int, tuple[int, Tensor]]) -> None:
        """These lie in the store now."""
        self.prompts |= prompts
        self.responses |= responses
        self._sorted = None

    def note_for_later(self, prompts: dict[int, Tensor], responses: dict[int, tuple[int, Tensor]]) -> None:
        """These lie in the store, and will be known when `settle` is called."""
        self._later[0].update(prompts)
        self._later[1].update(responses)

    def settle(self) -> None:
        """What was noted for later is known from now on."""
        if self._later[0]:
            self.note(*self._later)
            self._later = {}, {}

    def drop(self, entries: Iterable[int], slots: Iterable[int]) -> None:
        """These are about to be overwritten."""
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

    def keep(self, room: Room) -> None:
        """What still lies in a store of another room."""
        self.drop(
            [entry for entry in self.prompts if entry >= room.prompts],
            [slot for slot in self.responses if slot >= room.slots],
        )

    def _texts(self) -> list[tuple[tuple[int, ...], int, int, int]]:
        if self._sorted is None:
            prompts = {entry: tuple(text.tolist()) for entry, text in self.prompts.items()}
            found = [(text, len(text), entry, -1) for entry, text in prompts.items()]
            for slot, (entry, text) in self.responses.items():
                found.append((prompts[entry] + tuple(text.tolist()), len(prompts[entry]), entry, slot))
            self._sorted = sorted(found)
        return self._sorted

    def longest(self, prompt: Tensor) -> Source | None:
        """Where the longest known beginning of a prompt lies. Its last token is always read: its logits are wanted."""
        if len(prompt) <= WORTH or not self.prompts:
            return None
        wanted, texts = tuple(prompt[:-1].tolist()), self._texts()
        place = bisect(texts, (wanted,))
        best = max(texts[max(place - 1, 0) : place + 1], key=lambda text: _common(text[0], wanted))
        common, (_, own, entry, slot) = _common(best[0], wanted), best
        if common < WORTH:
            return None
        return Source(entry=entry, prompt_tokens=min(common, own), slot=slot, response_tokens=max(0, common - own))


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many numbers two texts begin with together."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def copy(store: Store, sources: Sequence[tuple[Source, int]]) -> None:
    """Put beginnings into new entries. All of a layer is read before any of it is written: an entry may be both."""
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
            found = [
                (index, origin[index[0], :, index[1]]) for index, origin in ((shared, table), (own, slot_tables[layer]))
            ]
            for index, values in found:
                table[index[2], :, index[3]] = values


def _index(runs: Sequence[tuple[int, int, int]], places: Tensor, device: torch.device) -> Tensor:
    """[4, n] from runs (row, tokens, first column they go to) and the rows they go to: row, column, to row, to column."""
    row, count, first = torch.tensor(runs).unbind(1)
    run = torch.repeat_interleave(count)
    column = torch.arange(len(run)) - (count.cumsum(0) - count)[run]
    return torch.stack([row[run], column, places[run], first[run] + column]).to(device)


def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """The bits of each parameter added up row by row, rows weighted by their number, on the device; equal where weights are.

    Version counters do not tell: a fused optimizer step and a write through `.data` leave them as they were.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = []
    for one in parameters:
        bits = one.detach().reshape(len(one), -1) if one.dim() else one.detach().reshape(1, 1)
        rows = bits.view(kinds[one.element_size()]).sum(1, dtype=torch.int64)
        found.append((rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum())
    return torch.stack(found)
