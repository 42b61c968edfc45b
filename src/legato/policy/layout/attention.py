"""One attention function for training packs, prefill and decode.

It is registered with transformers under the name "legato" and calls the current view, which knows how tokens are laid out. A
body uses it only inside `attending`; outside, the model keeps its own attention. Sliding windows, soft-capped scores and
attention sinks are supported, the last two by plain matrix products.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Queries, keys and values of one layer, `[batch, heads, tokens, width]`, and how that layer attends."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@runtime_checkable
class View(Protocol):
    """How the tokens of a forward pass are laid out, and which tokens each token attends to."""

    def attend(self, heads: Heads) -> Tensor:
        """The attention output, [batch, tokens, heads, width]."""


# A list and not a context variable: under gradient checkpointing the backward recomputes layers in threads of its own.
_VIEWS: list[View] = []


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    heads = Heads(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        query=query,
        key=key,
        value=value,
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return _VIEWS[-1].attend(heads), None


def register() -> None:
    """Register the function with transformers. It has no mask function, so that transformers builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register("legato", _attention)


@contextmanager
def attending(config: Any, view: View) -> Iterator[None]:
    """Inside, bodies with this configuration attend through the view. A backward that recomputes layers must run inside."""
    before = config._attn_implementation
    config._attn_implementation = "legato"
    _VIEWS.append(view)
    try:
        yield
    finally:
        _VIEWS.pop()
        config._attn_implementation = before


def attend(heads: Heads, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k / sqrt(d) + bias) v over `[batch, heads, tokens, width]`; without a bias it is causal."""
    repeat = query.shape[1] // key.shape[1]
    if heads.softcap is None and heads.sinks is None:
        if query.shape[2] == 1:
            # One query a row: the heads that share a key head become its queries, so that keys need not be repeated.
            grouped = query.reshape(len(query), key.shape[1], repeat, query.shape[3])
            attended = scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=heads.scaling)
            return attended.reshape(*query.shape[:3], value.shape[3])
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=bias is None, scale=heads.scaling)
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(2, 3) * (heads.scaling or query.shape[3] ** -0.5)
    if heads.softcap is not None:
        scores = torch.tanh(scores / heads.softcap) * heads.softcap
    scores = scores + (causal_bias(query.shape[2], query) if bias is None else bias)
    if heads.sinks is not None:
        sinks = heads.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def causal_bias(length: int, like: Tensor) -> Tensor:
    """[1, 1, length, length]: 0 where a query attends to a key, minus infinity elsewhere."""
    visible = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
    return as_bias(visible[None, None], like)


def as_bias(visible: Tensor, like: Tensor) -> Tensor:
    """The bias added to the scores: 0 where `visible`, minus infinity elsewhere."""
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill(~visible, -torch.inf)
