"""Packs: prompts and responses laid end to end without padding, the prompt of a group once.

An example, two responses "5$" and "61$" of the prompt "2+3=" (G = 1 prompt, R = 2 rows):
    input      2 + 3 =  5  6 1          the last token of a response is predicted, never read
    position   0 1 2 3  4  4 5
    read at    = 5   = 6 1              whose logits give 5 $ and 6 1 $
Each response attends to its prompt and itself, so its log-probs are those of the sequence alone.
"""

from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from legato.core.texts import Texts
from legato.core.threads import one_thread
from legato.policy.layout.attention import Heads, as_bias, attend
from legato.policy.layout.spans import Spans, Uses, move_to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Some rows of a table as one sequence of tokens for the body; it is also the view for attention."""

    rows: Tensor
    """[R]: which rows of the table."""
    width: int
    """The longest response of the pack."""
    tokens: Tensor
    """[N]"""
    positions: Tensor
    """[N]"""
    source: Tensor
    """[N]: the index of each token in the texts: prompts [G, P] flattened, then responses [B, T] flattened."""
    read: Tensor
    """[K]: at which of the N tokens logits are read."""
    targets: Tensor
    """[K]: the token that each of those logits predicts."""
    place: Tensor
    """[K]: the index of each target in the flattened [R, width]."""
    temperature: Tensor
    """[K]"""
    prefix: Tensor
    """[G, P] indices into N; padding points at token 0."""
    suffix: Tensor
    """[R, S] indices into N."""
    restore: Tensor
    """[N]: from the padded prefixes and suffixes, flattened and joined, back to N."""
    prefix_lengths: Tensor
    suffix_lengths: Tensor
    owner: Tensor
    """[R]: the prefix of each row."""
    counts: tuple[int, ...]
    """[R]: how many of the K targets each row has; known on the host."""
    prefix_tokens: int
    """How many of the N tokens are prompt tokens; they come first."""
    spans: Spans | None = None
    """The tiles of prompts and responses; on a GPU only."""
    reads: Uses | None = None
    """`read` with a deterministic backward; on a GPU only."""
    _biases: dict[tuple[int | None, torch.dtype], tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    @one_thread()
    def to(self, device: torch.device) -> "Pack":
        """The pack on another device; the host does not wait for the copies."""
        if self.tokens.device == device:
            return self
        with_spans = self
        if device.type == "cuda" and find_spec("triton") is not None:
            order = torch.argsort(self.owner, stable=True)
            spans = Spans.from_lengths(self.prefix_lengths, self.suffix_lengths[order], self.owner[order], self.positions)
            with_spans = replace(self, spans=spans, reads=Uses.from_index(self.read, len(self.tokens)))
        values = {
            f.name: move_to_device(getattr(with_spans, f.name), device)
            for f in fields(self)
            if f.init and f.name != "_biases"
        }
        return Pack(**values)

    @property
    def prompt_ends(self) -> Tensor:
        """[G]: the last token of each prompt among the N."""
        return self.prefix.gather(1, self.prefix_lengths[:, None] - 1).squeeze(1)

    def attend(self, heads: Heads) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (heads.query, heads.key, heads.value))
        plain = heads.softcap is None and heads.sinks is None and heads.key.shape == heads.value.shape
        if plain and self.spans is not None and Spans.serve(query, query.shape[-1]):
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
            return self.spans.attend(query, key, value, heads.scaling, heads.window).unsqueeze(0)
        prefix_bias, suffix_bias = self._bias(heads.window, heads.query)
        first = [self._table(x, self.prefix, 0) for x in (query, key, value)]
        parts = [_flat(attend(heads, first[0], first[1], first[2], prefix_bias))]
        if self.suffix.shape[1]:
            own = [self._table(x, self.suffix, self.prefix_tokens) for x in (query, key, value)]
            keys, values = (
                torch.cat([_Share.apply(prompt, self.owner), response], 2)  # type: ignore[no-untyped-call]
                for prompt, response in ((first[1], own[1]), (first[2], own[2]))
            )
            parts.append(_flat(attend(heads, own[0], keys, values, suffix_bias)))
        restored: Tensor = _Restore.apply(torch.cat(parts), self.restore)  # type: ignore[no-untyped-call]
        return restored.unsqueeze(0)

    def _table(self, values: Tensor, index: Tensor, first: int) -> Tensor:
        """[N, heads, width] to [rows, heads, columns, width]; the tokens of the table start at `first`."""
        inverse = self.restore[: self.prefix_tokens] if first == 0 else self.restore[first:] - self.prefix.numel()
        table: Tensor = _Gather.apply(values, index, inverse, first)  # type: ignore[no-untyped-call]
        return table.transpose(1, 2)

    def _bias(self, window: int | None, like: Tensor) -> tuple[Tensor | None, Tensor]:
        """The attention biases of prefixes and suffixes. Prefixes are causal, and their padding comes last."""
        kind = (window, like.dtype)
        if kind not in self._biases:
            device, width, depth = like.device, self.prefix.shape[1], self.suffix.shape[1]
            columns, steps = torch.arange(width, device=device), torch.arange(depth, device=device)
            lengths = self.prefix_lengths[self.owner, None]
            at_prefix = (columns < lengths)[:, None, :].expand(-1, depth, -1)
            at_suffix = (steps[:, None] >= steps)[None].expand(len(self.owner), -1, -1)
            visible, first = torch.cat([at_prefix, at_suffix], 2), None
            if window is not None:
                here = lengths + steps
                there = torch.cat([columns.expand(len(self.owner), -1), here], 1)
                visible = visible & (here[:, :, None] - there[:, None, :] < window)
                near = columns[:, None] - columns
                first = as_bias(((near >= 0) & (near < window))[None, None], like)
            self._biases[kind] = (first, as_bias(visible.unsqueeze(1), like))
        return self._biases[kind]


class _Gather(torch.autograd.Function):
    """Tokens into a padded table. Each token has one place there, so the backward is a deterministic gather too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, inverse: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape, ctx.first = values.shape, first
        return values.index_select(0, index.reshape(-1)).reshape(*index.shape, *values.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        to_values = gradients[0].new_zeros(ctx.shape)
        flat = gradients[0].reshape(-1, *ctx.shape[1:])
        to_values[ctx.first : ctx.first + len(inverse)] = flat.index_select(0, inverse)
        return to_values, None, None, None


class _Select(torch.autograd.Function):
    """Some rows of a table in the order of `index`. Subclasses define backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = values.shape
        return values.index_select(0, index)


class _Restore(_Select):
    """From the padded tables back to tokens; the backward writes each gradient to its one place."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (restore,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.shape).index_copy_(0, restore, gradients[0]), None


class _Share(_Select):
    """A prompt's keys for each of its rows; the backward adds rows up as a product with 0s and 1s, in a fixed order."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (owner,) = ctx.saved_tensors
        belongs = torch.arange(ctx.shape[0], device=owner.device).unsqueeze(1) == owner
        added = belongs.to(gradients[0].dtype) @ gradients[0].reshape(len(owner), -1)
        return added.reshape(ctx.shape), None


def _flat(values: Tensor) -> Tensor:
    """[rows, heads, columns, width] to [rows * columns, heads, width]."""
    return values.transpose(1, 2).flatten(0, 1)


@one_thread()
def pack(texts: Texts, rows: Tensor, *, shared: bool = True) -> Pack:
    """Lay some rows out as one pack, on the host, where lengths are known without waiting for a GPU.

    If not `shared`, every row gets its own copy of the prompt, as in most trainers; the log-probs are the same.
    """
    device = texts.tokens.device
    groups, owner = texts.group[rows], torch.arange(len(rows), device=device)
    if shared:
        groups, owner = torch.unique(groups, return_inverse=True)
    prefix_lengths, lengths = texts.prompt_lengths[groups], texts.lengths[rows]
    width = int(lengths.max()) if len(rows) else 0
    deep = max(width - 1, 0)
    columns, steps = torch.arange(int(prefix_lengths.max()), device=device), torch.arange(deep, device=device)
    in_prefix, in_suffix = columns < prefix_lengths[:, None], steps < (lengths - 1).clamp(min=0)[:, None]
    prefix = _running_numbers(in_prefix)
    # Responses of one prompt are adjacent, whatever the order of the rows.
    order = torch.argsort(owner, stable=True)

    def in_pack_order(values: Tensor) -> Tensor:
        """[R, S] to the response tokens in pack order."""
        return values[order][in_suffix[order]]

    numbers = torch.empty_like(in_suffix, dtype=torch.int64)
    numbers[order] = _running_numbers(in_suffix[order]) + in_prefix.sum()
    suffix = torch.where(in_suffix, numbers, 0)

    tokens, is_target = texts.tokens[rows, :width], texts.mask[rows, :width]
    is_target = is_target & (torch.arange(width, device=device) < lengths[:, None])
    last = prefix.gather(1, prefix_lengths[:, None] - 1)[owner]
    read = torch.cat([last, suffix], 1)[:, :width]
    inputs = tokens[:, :deep]
    return Pack(
        rows=rows,
        width=width,
        tokens=torch.cat([texts.prompts[groups][:, : in_prefix.shape[1]][in_prefix], in_pack_order(inputs)]),
        positions=torch.cat(
            [columns.expand(len(groups), -1)[in_prefix], in_pack_order(prefix_lengths[owner, None] + steps)]
        ),
        source=torch.cat(
            [
                (groups[:, None] * texts.prompts.shape[1] + columns)[in_prefix],
                in_pack_order(texts.prompts.numel() + rows[:, None] * texts.tokens.shape[1] + steps),
            ]
        ),
        read=read[is_target],
        targets=tokens[is_target],
        place=is_target.reshape(-1).nonzero().squeeze(1),
        temperature=texts.temperature[rows, None].expand(-1, width)[is_target],
        prefix=torch.where(in_prefix, prefix, 0),
        suffix=suffix,
        restore=torch.cat(
            [
                in_prefix.reshape(-1).nonzero().squeeze(1),
                in_prefix.numel() + in_pack_order(torch.arange(in_suffix.numel()).reshape(in_suffix.shape)),
            ]
        ),
        prefix_lengths=prefix_lengths,
        suffix_lengths=(lengths - 1).clamp(min=0),
        owner=owner,
        counts=tuple(is_target.sum(1).tolist()),
        prefix_tokens=int(prefix_lengths.sum()),
    )


def _running_numbers(present: Tensor) -> Tensor:
    """The running number of each True entry of `present`, row by row."""
    return (present.reshape(-1).cumsum(0) - 1).reshape(present.shape)
