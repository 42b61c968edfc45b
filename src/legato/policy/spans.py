"""Attention of a pack on a GPU without a padded table: one call over sequences of different lengths.

The queries of a pack lie as its tokens do: prompts, then responses. The keys of a response are those of its prompt and its
own, so keys and values are gathered into [prompt | prompt + response | ...]; a causal mask aligned at the end of each
sequence is then right for both. The backward gathers again, and adds what came to a prompt's keys from its responses in
float32 in a fixed order.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from legato.core.device import sent

QUERY_TILE, KEY_TILE = 128, 64
"""Tokens of a tile of queries and of keys in `triton/attention.py`."""
KERNEL = "flash"
"""'flash': gathered keys through torch's flash attention. 'shared': our own kernel, which gathers nothing and repeats to
the bit by itself; it is proven in Triton's interpreter and has not been measured on a GPU yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """Rows taken from a table, some several times; and, the other way, which takings each row of the table has."""

    index: Tensor
    """[M]: which row."""
    order: Tensor
    """[M]: takings sorted by row."""
    ends: Tensor
    """[N + 1] int32: the takings of row n are order[ends[n] : ends[n + 1]]."""

    @classmethod
    def of(cls, index: Tensor, count: int) -> "Uses":
        order = torch.argsort(index, stable=True)
        return cls(index=index, order=order, ends=_ends(torch.bincount(index, minlength=count)))

    def take(self, values: Tensor) -> Tensor:
        """[N, ...] to [M, ...], differentiable."""
        taken: Tensor = _Take.apply(values, self)  # type: ignore[no-untyped-call]
        return taken

    def give_back(self, gradient: Tensor) -> Tensor:
        """[M, ...] to [N, ...]: the sum over the takings of each row, in their order, in float32."""
        if gradient.is_cuda:
            from legato.policy.triton.sums import sum_uses

            return sum_uses(gradient.contiguous(), None, self.order, self.ends)[0]
        exact = torch.promote_types(gradient.dtype, torch.float32)
        found = gradient.new_zeros(len(self.ends) - 1, *gradient.shape[1:], dtype=exact)
        return found.index_add_(0, self.index, gradient.to(exact)).to(gradient.dtype)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, uses: Uses) -> Tensor:
        ctx.uses = uses
        return values.index_select(0, uses.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.uses.give_back(gradients[0]), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the sequences of a pack begin and end, for queries and for gathered keys."""

    query_ends: Tensor
    """[S + 1] int32, from 0."""
    key_ends: Tensor
    longest_query: int
    longest_keys: int
    keys: Uses
    places: Tensor | None = None
    """[N] int32: the position of each token in its text; this and the tiles for our own kernel only."""
    query_tiles: Tensor | None = None
    """[tiles, 5] int32: first token, its span from and to, the prompt's first token and length (0: none)."""
    key_tiles: Tensor | None = None
    """[tiles, 5] int32: first token, its span from and to, the responses that look at it from and to."""

    @classmethod
    def of(cls, prefix_lengths: Tensor, suffix_lengths: Tensor, owner: Tensor, positions: Tensor) -> "Spans":
        """On the host; responses in the order of their prompts."""
        prompt, tokens = int(prefix_lengths.sum()), int(prefix_lengths.sum() + suffix_lengths.sum())
        seen = prefix_lengths[owner]
        query_lengths, key_lengths = (
            torch.cat([prefix_lengths, suffix_lengths]),
            torch.cat([prefix_lengths, seen + suffix_lengths]),
        )
        prefix_first = prefix_lengths.cumsum(0) - prefix_lengths
        suffix_first = prompt + suffix_lengths.cumsum(0) - suffix_lengths
        # Pieces in order: every prompt, then for every response its prompt and itself.
        firsts = torch.cat([prefix_first, torch.stack([prefix_first[owner], suffix_first], 1).reshape(-1)])
        lengths = torch.cat([prefix_lengths, torch.stack([seen, suffix_lengths], 1).reshape(-1)])
        shift = firsts - (lengths.cumsum(0) - lengths)
        index = torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)
        found = cls(
            query_ends=_ends(query_lengths),
            key_ends=_ends(key_lengths),
            longest_query=int(query_lengths.max()),
            longest_keys=int(key_lengths.max()),
            keys=Uses.of(index, tokens),
        )
        if KERNEL == "flash":
            return found
        looked_at = _looked_at(prefix_lengths, prefix_first, owner)
        looking = _looking(suffix_lengths, suffix_first, owner, len(prefix_lengths))
        return replace(
            found,
            places=positions.int(),
            query_tiles=_tiles(query_lengths, QUERY_TILE, *looked_at),
            key_tiles=_tiles(query_lengths, KEY_TILE, *looking),
        )

    @staticmethod
    def serve(like: Tensor, width: int) -> bool:
        """Whether the kernel behind takes heads so wide, of this dtype and device; others go through padded tables."""
        return like.is_cuda and like.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """[N, H, D] from queries [N, H, D] and keys and values [N, K, D] of the pack's tokens."""
        how = _AttendShared if KERNEL == "shared" else _Attend
        found: Tensor = how.apply(query, key, value, self, scaling, window)  # type: ignore[no-untyped-call]
        return found


class _Attend(torch.autograd.Function):
    """Flash attention over sequences of different lengths. Gathered keys are not kept, so memory is the pack's."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float | None, window: int | None
    ) -> Tensor:
        from legato.policy.triton.sums import take

        ctx.spans, ctx.how = spans, _how(scaling, window)
        out, normaliser, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query,
            *take(key, value, spans.keys.index),
            spans.query_ends,
            spans.key_ends,
            spans.longest_query,
            spans.longest_keys,
            0.0,
            True,
            False,
            **ctx.how,
        )
        ctx.save_for_backward(query, key, value, out, normaliser, state, unused)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from legato.policy.triton.sums import sum_uses, take

        query, key, value, out, normaliser, state, unused = ctx.saved_tensors
        spans: Spans = ctx.spans
        # With a key head per query head the kernel's own sum over them, which is slow, falls away.
        repeat = query.shape[1] // key.shape[1]
        keys, values = take(key, value, spans.keys.index, repeat)
        with _same_every_time():
            to_query, to_keys, to_values = torch.ops.aten._flash_attention_backward(
                gradients[0].contiguous(),
                query,
                keys,
                values,
                out,
                normaliser,
                spans.query_ends,
                spans.key_ends,
                spans.longest_query,
                spans.longest_keys,
                0.0,
                True,
                state,
                unused,
                **ctx.how,
            )
        to_key, to_value = sum_uses(to_keys, to_values, spans.keys.order, spans.keys.ends, repeat)
        return to_query, to_key, to_value, None, None, None


class _AttendShared(torch.autograd.Function):
    """Attention that reads a prompt's keys where they lie (`triton/attention.py`)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float | None, window: int | None
    ) -> Tensor:
        from legato.policy.triton.attention import attend_forward

        ctx.spans, ctx.how = spans, (scaling if scaling is not None else query.shape[-1] ** -0.5, window or 0)
        assert spans.places is not None and spans.query_tiles is not None
        out, normaliser = attend_forward(query, key, value, spans.places, spans.query_tiles, *ctx.how)
        ctx.save_for_backward(query, key, value, out, normaliser)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from legato.policy.triton.attention import attend_backward

        query, key, value, out, normaliser = ctx.saved_tensors
        spans: Spans = ctx.spans
        assert spans.places is not None and spans.query_tiles is not None and spans.key_tiles is not None
        tiles = (spans.places, spans.query_tiles, spans.key_tiles)
        given = (query, key, value, out, gradients[0].contiguous(), normaliser)
        return (*attend_backward(*given, *tiles, *ctx.how), None, None, None)


def _tiles(lengths: Tensor, size: int, beside: Tensor, beside_end: Tensor) -> Tensor:
    """Every span in tiles of at most so many tokens, with what is beside it."""
    first, counts = lengths.cumsum(0) - lengths, -(-lengths // size)
    span = torch.arange(len(lengths)).repeat_interleave(counts)
    number = torch.arange(len(span)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    rows = (first[span] + number * size, first[span], (first + lengths)[span], beside[span], beside_end[span])
    return torch.stack(rows, 1).int()


def _looked_at(prefix_lengths: Tensor, prefix_first: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Of every span the prompt it looks at: first token and length; prompts look at none."""
    none = torch.zeros_like(prefix_lengths)
    return torch.cat([none, prefix_first[owner]]), torch.cat([none, prefix_lengths[owner]])


def _looking(suffix_lengths: Tensor, suffix_first: Tensor, owner: Tensor, prompts: int) -> tuple[Tensor, Tensor]:
    """Of every span the tokens beyond it that look at it, from and to: of a prompt, its responses, which lie together."""
    tokens = torch.zeros(prompts, dtype=torch.int64).index_add_(0, owner, suffix_lengths)
    begin = suffix_first[:1].sum() + tokens.cumsum(0) - tokens
    none = torch.zeros_like(suffix_lengths)
    return torch.cat([begin, none]), torch.cat([begin + tokens, none])


def _how(scaling: float | None, window: int | None) -> dict[str, Any]:
    how: dict[str, Any] = {"scale": scaling}
    return how if window is None else how | {"window_size_left": window - 1, "window_size_right": 0}


class _same_every_time:  # noqa: N801  (used as a statement)
    """The backward adds up queries' gradients in a fixed order: an update then repeats to the bit."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        self.warned = torch.is_deterministic_algorithms_warn_only_enabled()
        # Everything that is allocated here is written whole: there is nothing to fill first.
        self.fills = torch._C._get_deterministic_fill_uninitialized_memory()
        torch._C._set_deterministic_fill_uninitialized_memory(False)
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.before, warn_only=self.warned)
        torch._C._set_deterministic_fill_uninitialized_memory(self.fills)


def _ends(lengths: Tensor) -> Tensor:
    """[n + 1] int32, from 0: where each of n runs ends and the next begins."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def moved(value: Any, device: torch.device) -> Any:
    """A value of tensors and plain numbers on another device."""
    if isinstance(value, Tensor):
        return sent(value, device)
    if isinstance(value, Uses | Spans):
        return type(value)(**{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value
