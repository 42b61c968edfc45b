"""Attention over a pack on a GPU without padded tables: its prompts and responses, cut into tiles.

A pack holds prompts, then responses in the order of their prompts. A response attends to its prompt, which is stored once,
and to itself. `kernels/attention.py` reads the keys in place and adds up gradients in a fixed order.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from legato.core.device import to_device

TILE = 64
"""The most tokens in a tile, of queries or of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """A gather of rows from a table, some several times, and its inverse: which gathered rows come from each table row."""

    index: Tensor
    """[M]: the table row of each gathered row."""
    order: Tensor
    """[M]: gathered rows sorted by table row."""
    ends: Tensor
    """[N + 1] int32: table row n was gathered as order[ends[n] : ends[n + 1]]."""

    @classmethod
    def from_index(cls, index: Tensor, count: int) -> "Uses":
        order = torch.argsort(index, stable=True)
        return cls(index=index, order=order, ends=_ends(torch.bincount(index, minlength=count)))

    def take(self, values: Tensor) -> Tensor:
        """[N, ...] to [M, ...], differentiable."""
        taken: Tensor = _Take.apply(values, self)  # type: ignore[no-untyped-call]
        return taken

    def sum_gradients(self, gradient: Tensor) -> Tensor:
        """Backward of `take`, [M, ...] to [N, ...]: a scatter-add in float32 in a fixed order."""
        if gradient.is_cuda:
            from legato.policy.kernels.sums import sum_uses

            return sum_uses(gradient.contiguous(), self.order, self.ends)
        exact = torch.promote_types(gradient.dtype, torch.float32)
        sums = gradient.new_zeros(len(self.ends) - 1, *gradient.shape[1:], dtype=exact)
        return sums.index_add_(0, self.index, gradient.to(exact)).to(gradient.dtype)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, uses: Uses) -> Tensor:
        ctx.uses = uses
        return values.index_select(0, uses.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.uses.sum_gradients(gradients[0]), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The prompts and responses of a pack in tiles of at most `TILE` tokens."""

    places: Tensor
    """[N] int32: the position of each token in its text."""
    query_tiles: Tensor
    """[tiles, 5] int32: first token, begin and end of its span, first token and length of its prompt (length 0: none)."""
    key_tiles: Tensor
    """[tiles, 5] int32: first token, begin and end of its span, begin and end of the responses that attend to it."""

    @classmethod
    def from_lengths(cls, prefix_lengths: Tensor, suffix_lengths: Tensor, owner: Tensor, positions: Tensor) -> "Spans":
        """Compute the tiles on the host; responses must be in the order of their prompts."""
        lengths = torch.cat([prefix_lengths, suffix_lengths])
        prefix_first = prefix_lengths.cumsum(0) - prefix_lengths
        suffix_first = prefix_lengths.sum() + suffix_lengths.cumsum(0) - suffix_lengths
        return cls(
            places=positions.int(),
            query_tiles=_tiles(lengths, *_prompts_of_spans(prefix_lengths, prefix_first, owner)),
            key_tiles=_tiles(lengths, *_responses_of_spans(suffix_lengths, suffix_first, owner, len(prefix_lengths))),
        )

    @staticmethod
    def serve(like: Tensor, width: int) -> bool:
        """Whether the kernel supports heads of this width, dtype and device; others use padded tables."""
        return like.is_cuda and like.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """[N, H, D] from queries [N, H, D] and keys and values [N, K, D] of the pack's tokens."""
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out: Tensor = _Attend.apply(query, key, value, self, scaling, window)  # type: ignore[no-untyped-call]
        return out

    def attend_forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """The output of `attend`, and the normaliser [H, N] that its backward needs."""
        from legato.policy.kernels.attention import attend_forward

        return attend_forward(query, key, value, self.places, self.query_tiles, scaling, window or 0)

    def attend_backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        normaliser: Tensor,
        to_out: Tensor,
        scaling: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        from legato.policy.kernels.attention import attend_backward

        saved = (query, key, value, out, to_out.contiguous(), normaliser)
        return attend_backward(*saved, self.places, self.query_tiles, self.key_tiles, scaling, window or 0)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float, window: int | None
    ) -> Tensor:
        out, normaliser = spans.attend_forward(query, key, value, scaling, window)
        ctx.spans, ctx.how = spans, (scaling, window)
        ctx.save_for_backward(query, key, value, out, normaliser)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser = ctx.saved_tensors
        to_heads = ctx.spans.attend_backward(query, key, value, out, normaliser, gradients[0], *ctx.how)
        return (*to_heads, None, None, None)


def _tiles(lengths: Tensor, beside: Tensor, beside_end: Tensor) -> Tensor:
    """Every span in tiles [tiles, 5], each with the token range (`beside`, `beside_end`) of its span."""
    first, counts = lengths.cumsum(0) - lengths, -(-lengths // TILE)
    span = torch.arange(len(lengths)).repeat_interleave(counts)
    number = torch.arange(len(span)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    rows = (first[span] + number * TILE, first[span], (first + lengths)[span], beside[span], beside_end[span])
    return torch.stack(rows, 1).int()


def _prompts_of_spans(prefix_lengths: Tensor, prefix_first: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """For every span the prompt it attends to: first token and length; 0 for prompts themselves."""
    none = torch.zeros_like(prefix_lengths)
    return torch.cat([none, prefix_first[owner]]), torch.cat([none, prefix_lengths[owner]])


def _responses_of_spans(suffix_lengths: Tensor, suffix_first: Tensor, owner: Tensor, prompts: int) -> tuple[Tensor, Tensor]:
    """For every span, begin and end of the response tokens that attend to it; they are adjacent. Only prompts have any."""
    tokens = torch.zeros(prompts, dtype=torch.int64).index_add_(0, owner, suffix_lengths)
    begin = suffix_first[:1].sum() + tokens.cumsum(0) - tokens
    none = torch.zeros_like(suffix_lengths)
    return torch.cat([begin, none]), torch.cat([begin + tokens, none])


def _ends(lengths: Tensor) -> Tensor:
    """[n + 1] int32, from 0: where each of n runs ends and the next begins."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def move_to_device(value: Any, device: torch.device) -> Any:
    """A copy of a tensor, `Uses` or `Spans` on another device; other values are returned as they are."""
    if isinstance(value, Tensor):
        return to_device(value, device)
    if isinstance(value, Uses | Spans):
        return type(value)(**{field.name: move_to_device(getattr(value, field.name), device) for field in fields(value)})
    return value
