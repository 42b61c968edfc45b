"""Reading prompts into the store: whole, or only what follows a part whose keys and values were copied.

Prompts are read in packs of a token budget, so that what a pass holds in memory does not depend on how many are waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.policy.layout.attention import Heads, as_bias, attend
from legato.policy.layout.packs import Pack, pack
from legato.policy.policy import Policy
from legato.rollouts.gpu.slots import Store, Tables, numbers
from legato.rollouts.local.routes import heard
from legato.rollouts.prompts import prompt_texts

TOKENS_AT_ONCE = 16384
"""Of one pass, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A prompt to be read into an entry of the store."""

    entry: int
    prompt: Tensor
    """[P], on the host"""
    known: int = 0
    """Tokens at its beginning whose keys and values the entry holds already; fewer than P."""

    @property
    def new(self) -> int:
        return len(self.prompt) - self.known


@dataclass(frozen=True, slots=True)
class Written:
    """A response that decodes: where its prompt lies, its slot, and its tokens so far."""

    entry: int
    prompt: Tensor
    slot: int
    tokens: Tensor
    """[n], at least 1; the key of the last one is not stored yet."""


def read(policy: Policy, store: Store, openings: Sequence[Opening]) -> None:
    """Fill the entries, and note the last hidden state of each prompt."""
    for continued in (False, True):
        chosen = sorted((one for one in openings if (one.known > 0) is continued), key=lambda one: one.new)
        for part in _parts(chosen):
            entries = numbers([one.entry for one in part], store.device)
            store.prompt_length[entries] = numbers([len(one.prompt) for one in part], store.device)
            hidden = _continued(policy, store, part, entries) if continued else _whole(policy, store, part, entries)
            store.keep_ending(hidden, entries)


def read_again(policy: Policy, store: Store, texts: Sequence[Written]) -> None:
    """Compute keys and values of prompts and of responses so far anew, where they lie; their routes stay as recorded."""
    groups: dict[int, list[Written]] = {}
    for text in texts:
        groups.setdefault(text.entry, []).append(text)
    parts: list[list[list[Written]]] = []
    room = 0
    for group in groups.values():
        tokens = len(group[0].prompt) + sum(len(text.tokens) for text in group)
        if not parts or tokens > room:
            parts.append([])
            room = TOKENS_AT_ONCE
        parts[-1].append(group)
        room -= tokens
    for part in parts:
        _read_groups_again(policy, store, part)


def _read_groups_again(policy: Policy, store: Store, groups: Sequence[Sequence[Written]]) -> None:
    written = [text for group in groups for text in group]
    pad, lengths = torch.nn.utils.rnn.pad_sequence, torch.tensor([len(text.tokens) for text in written])
    tokens = pad([text.tokens for text in written], batch_first=True)
    texts = replace(
        prompt_texts([group[0].prompt for group in groups]),
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        group=torch.repeat_interleave(torch.tensor([len(group) for group in groups])),
        temperature=torch.ones(len(written)),
    )
    packed = pack(texts, torch.arange(len(written))).to(store.device)
    entries = numbers([group[0].entry for group in groups], store.device)
    slots = numbers([text.slot for text in written], store.device)
    with policy.attending(_Whole(store, packed, entries, slots)):
        hidden = policy.hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]
    store.keep_ending(hidden[packed.prompt_ends], entries)


def _parts(openings: Sequence[Opening]) -> list[list[Opening]]:
    """Runs of openings, shortest first, whose rectangles are within the budget; a longer one is a run of its own."""
    parts: list[list[Opening]] = []
    for one in openings:
        if not parts or (len(parts[-1]) + 1) * one.new > TOKENS_AT_ONCE:
            parts.append([])
        parts[-1].append(one)
    return parts


def _whole(policy: Policy, store: Store, openings: Sequence[Opening], entries: Tensor) -> Tensor:
    texts = prompt_texts([one.prompt for one in openings])
    packed = pack(texts, torch.arange(len(openings))).to(store.device)
    columns = packed.prefix.shape[1]

    def note(number: int, experts: Tensor) -> None:
        store.prompt_routes[number][entries, 0, :columns] = experts[packed.prefix]

    with policy.attending(_Whole(store, packed, entries)), heard(store.routers, note):
        hidden = policy.hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]
    return hidden[packed.prompt_ends]


def _continued(policy: Policy, store: Store, openings: Sequence[Opening], entries: Tensor) -> Tensor:
    view = _Continued(store, openings, entries)
    table = torch.nn.utils.rnn.pad_sequence([one.prompt[one.known :] for one in openings], batch_first=True)

    def note(number: int, experts: Tensor) -> None:
        found = experts.reshape(*view.positions.shape, -1)[view.row, view.step]
        store.prompt_routes[number][entries[view.row], 0, view.column] = found

    with policy.attending(view), heard(store.routers, note):
        hidden = policy.hidden(table.to(store.device), view.positions)
    last = numbers([one.new - 1 for one in openings], store.device)
    return hidden[torch.arange(len(openings), device=store.device), last]


class _Whole:
    """The view of a pack that also fills the store: prompts, and responses where slots are given."""

    def __init__(self, store: Store, packed: Pack, entries: Tensor, slots: Tensor | None = None) -> None:
        self.store, self.packed, self.entries, self.slots = store, packed, entries, slots

    def attend(self, heads: Heads) -> Tensor:
        store, packed = self.store, self.packed
        store.show(heads)
        self._fill(store.prompt_keys, store.prompt_values, self.entries, packed.prefix, heads)
        if self.slots is not None:
            self._fill(store.keys, store.values, self.slots, packed.suffix, heads)
        return packed.attend(heads)

    def _fill(self, keys: Tables, values: Tables, rows: Tensor, index: Tensor, heads: Heads) -> None:
        """`index` [rows, columns]: which token of the pack goes to each column."""
        for tables, source in ((keys, heads.key), (values, heads.value)):
            tables[heads.layer][rows, :, : index.shape[1]] = source[0].transpose(0, 1)[index].transpose(1, 2)


class _Continued:
    """The view of what follows known beginnings, a prompt a row: it sees the entry, where its own keys have been put too.

    The store keeps every key whatever a layer's window, so layers with a sliding window are served as the others are.
    """

    def __init__(self, store: Store, openings: Sequence[Opening], entries: Tensor) -> None:
        self.store, self.entries, device = store, entries, store.device
        known, total = (torch.tensor([get(one) for one in openings]) for get in (_known, _total))
        steps = torch.arange(int((total - known).max()))
        real = steps < (total - known)[:, None]
        # Padding comes last and stands where the last token does: it has something to see, and nobody sees it.
        positions = torch.minimum(known[:, None] + steps, total[:, None] - 1)
        row, step = real.nonzero(as_tuple=True)
        self.positions = positions.to(device)
        self.row, self.step = row.to(device), step.to(device)
        self.column = positions[row, step].to(device)
        self.width = int(total.max())
        self._biases: dict[int | None, Tensor] = {}

    def attend(self, heads: Heads) -> Tensor:
        seen = []
        for tables, source in ((self.store.prompt_keys, heads.key), (self.store.prompt_values, heads.value)):
            table = tables[heads.layer]
            table[self.entries[self.row], :, self.column] = source.transpose(1, 2)[self.row, self.step]
            seen.append(table[self.entries, :, : self.width])
        return attend(heads, heads.query, seen[0], seen[1], self._bias(heads.window, heads.query)).transpose(1, 2)

    def _bias(self, window: int | None, like: Tensor) -> Tensor:
        if window not in self._biases:
            distance = self.positions[:, :, None] - torch.arange(self.width, device=like.device)
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._biases[window] = as_bias(seen.unsqueeze(1), like)
        return self._biases[window]


def _known(one: Opening) -> int:
    return one.known


def _total(one: Opening) -> int:
    return len(one.prompt)
