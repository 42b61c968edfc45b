"""Prefill of prompts into the store: whole prompts, or the rest after a prefix whose KV cache was copied.

Prompts are read in packs of a token budget, so that the memory of a pass does not depend on how many prompts wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.policy.layout.attention import Heads, as_bias, attend
from legato.policy.layout.packs import Pack, pack
from legato.policy.policy import Policy
from legato.rollouts.gpu.slots import KVStore, Tables, device_ints
from legato.rollouts.local.routes import listen_to_routers
from legato.rollouts.prompts import prompt_texts

TOKENS_AT_ONCE = 16384
"""Token budget of one pass, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A prompt to prefill into an entry of the store."""

    entry: int
    prompt: Tensor
    """[P], on the host"""
    known: int = 0
    """Length of the prefix whose keys and values the entry already holds; less than P."""

    @property
    def new(self) -> int:
        return len(self.prompt) - self.known


@dataclass(frozen=True, slots=True)
class PartialResponse:
    """A response that is being decoded: its prompt, its slot, and its tokens so far."""

    entry: int
    prompt: Tensor
    slot: int
    tokens: Tensor
    """[n], at least 1; the key of the last one is not stored yet."""


def read_prompts(policy: Policy, store: KVStore, openings: Sequence[Opening]) -> None:
    """Prefill prompts into their entries and store the last hidden state of each.

    Under an exact policy (`Policy.exact`) whole prompts and partial responses are read by the layers of training.
    """
    for continued in (False, True):
        chosen = sorted((one for one in openings if (one.known > 0) is continued), key=lambda one: one.new)
        for part in _batches_in_budget(chosen):
            entries = device_ints([one.entry for one in part], store.device)
            store.prompt_length[entries] = device_ints([len(one.prompt) for one in part], store.device)
            hidden = _read_rest(policy, store, part, entries) if continued else _read_whole(policy, store, part, entries)
            store.keep_ending(hidden, entries)


def reread(policy: Policy, store: KVStore, texts: Sequence[PartialResponse]) -> None:
    """Recompute the KV cache of prompts and partial responses in place. Recorded routes stay."""
    groups: dict[int, list[PartialResponse]] = {}
    for text in texts:
        groups.setdefault(text.entry, []).append(text)
    parts: list[list[list[PartialResponse]]] = []
    room = 0
    for group in groups.values():
        tokens = len(group[0].prompt) + sum(len(text.tokens) for text in group)
        if not parts or tokens > room:
            parts.append([])
            room = TOKENS_AT_ONCE
        parts[-1].append(group)
        room -= tokens
    for part in parts:
        _reread_groups(policy, store, part)


def _reread_groups(policy: Policy, store: KVStore, groups: Sequence[Sequence[PartialResponse]]) -> None:
    responses = [text for group in groups for text in group]
    pad, lengths = torch.nn.utils.rnn.pad_sequence, torch.tensor([len(text.tokens) for text in responses])
    tokens = pad([text.tokens for text in responses], batch_first=True)
    texts = replace(
        prompt_texts([group[0].prompt for group in groups]),
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        group=torch.repeat_interleave(torch.tensor([len(group) for group in groups])),
        temperature=torch.ones(len(responses)),
    )
    packed = pack(texts, torch.arange(len(responses))).to(store.device)
    entries = device_ints([group[0].entry for group in groups], store.device)
    slots = device_ints([text.slot for text in responses], store.device)
    hidden = _WholePrompts(store, packed, entries, slots).read(policy)
    store.keep_ending(hidden[packed.prompt_ends], entries)


def _batches_in_budget(openings: Sequence[Opening]) -> list[list[Opening]]:
    """Group openings, sorted by length, so that each padded batch is within the budget; a longer prompt is alone."""
    parts: list[list[Opening]] = []
    for one in openings:
        if not parts or (len(parts[-1]) + 1) * one.new > TOKENS_AT_ONCE:
            parts.append([])
        parts[-1].append(one)
    return parts


def _read_whole(policy: Policy, store: KVStore, openings: Sequence[Opening], entries: Tensor) -> Tensor:
    texts = prompt_texts([one.prompt for one in openings])
    packed = pack(texts, torch.arange(len(openings))).to(store.device)
    columns = packed.prefix.shape[1]

    def note(number: int, experts: Tensor) -> None:
        store.prompt_routes[number][entries, 0, :columns] = experts[packed.prefix]

    with listen_to_routers(store.routers, note):
        hidden = _WholePrompts(store, packed, entries).read(policy)
    if not store.prompt_keys:
        # Comparing log-probs would not always notice it: those of small random weights hardly depend on attention.
        raise RuntimeError(f"{type(policy.body).__name__} does not attend through transformers' attention interface")
    return hidden[packed.prompt_ends]


def _read_rest(policy: Policy, store: KVStore, openings: Sequence[Opening], entries: Tensor) -> Tensor:
    view = _PromptRests(store, openings, entries)
    table = torch.nn.utils.rnn.pad_sequence([one.prompt[one.known :] for one in openings], batch_first=True)

    def note(number: int, experts: Tensor) -> None:
        chosen_experts = experts.reshape(*view.positions.shape, -1)[view.row, view.step]
        store.prompt_routes[number][entries[view.row], 0, view.column] = chosen_experts

    with policy.attending(view), listen_to_routers(store.routers, note):
        hidden = policy.hidden(table.to(store.device), view.positions)
    last = device_ints([one.new - 1 for one in openings], store.device)
    return hidden[torch.arange(len(openings), device=store.device), last]


class _WholePrompts:
    """The view of a pack that also fills the store: with prompts, and with responses if slots are given."""

    def __init__(self, store: KVStore, packed: Pack, entries: Tensor, slots: Tensor | None = None) -> None:
        self.store, self.packed, self.entries, self.slots = store, packed, entries, slots

    def read(self, policy: Policy) -> Tensor:
        """The last hidden state of every token of the pack; the store receives keys and values."""
        packed = self.packed
        if policy.exact:
            return policy.read_as_in_training(packed, self._keep)
        with policy.attending(self):
            return policy.hidden(packed.tokens.unsqueeze(0), packed.positions.unsqueeze(0))[0]

    def attend(self, heads: Heads) -> Tensor:
        self._keep(heads.layer, *(table[0].transpose(0, 1) for table in (heads.key, heads.value)))
        return self.packed.attend(heads)

    def _keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values [N, K, D] of a layer."""
        store = self.store
        store.make_tables(layer, keys)
        self._fill((store.prompt_keys, store.prompt_values), layer, self.entries, self.packed.prefix, (keys, values))
        if self.slots is not None:
            self._fill((store.keys, store.values), layer, self.slots, self.packed.suffix, (keys, values))

    def _fill(
        self, tables: tuple[Tables, Tables], layer: int, rows: Tensor, index: Tensor, sources: tuple[Tensor, Tensor]
    ) -> None:
        """Copy keys and values into tables. `index` [rows, columns] is the token of the pack for each column."""
        for table, source in zip(tables, sources, strict=True):
            table[layer][rows, :, : index.shape[1]] = source[index].transpose(1, 2)


class _PromptRests:
    """The view of prompt rests, one prompt per row. Rows attend over their entry, which also receives their new keys.

    The store keeps every key whatever a layer's window, so layers with a sliding window need no special case.
    """

    def __init__(self, store: KVStore, openings: Sequence[Opening], entries: Tensor) -> None:
        self.store, self.entries, device = store, entries, store.device
        known, total = (torch.tensor([get(one) for one in openings]) for get in (_known_tokens, _prompt_tokens))
        steps = torch.arange(int((total - known).max()))
        real = steps < (total - known)[:, None]
        # Padding comes last and repeats the last position: it attends to real keys, and no token attends to it.
        positions = torch.minimum(known[:, None] + steps, total[:, None] - 1)
        row, step = real.nonzero(as_tuple=True)
        self.positions = positions.to(device)
        self.row, self.step = row.to(device), step.to(device)
        self.column = positions[row, step].to(device)
        self.width = int(total.max())
        self._biases: dict[int | None, Tensor] = {}

    def attend(self, heads: Heads) -> Tensor:
        tables_read = []
        for tables, source in ((self.store.prompt_keys, heads.key), (self.store.prompt_values, heads.value)):
            table = tables[heads.layer]
            table[self.entries[self.row], :, self.column] = source.transpose(1, 2)[self.row, self.step]
            tables_read.append(table[self.entries, :, : self.width])
        return attend(heads, heads.query, tables_read[0], tables_read[1], self._bias(heads.window, heads.query)).transpose(
            1, 2
        )

    def _bias(self, window: int | None, like: Tensor) -> Tensor:
        if window not in self._biases:
            distance = self.positions[:, :, None] - torch.arange(self.width, device=like.device)
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._biases[window] = as_bias(visible.unsqueeze(1), like)
        return self._biases[window]


def _known_tokens(one: Opening) -> int:
    return one.known


def _prompt_tokens(one: Opening) -> int:
    return len(one.prompt)
