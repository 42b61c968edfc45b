"""A body through fused layer parts, for families whose layers are built as Llama's are: in decoding and in training.

Per layer: norm, three projections, heads made ready and stored, attention, projection, norm with the residual, SwiGLU MLP.
The projections are the modules themselves (LoRA stays as it is). What a family does otherwise is found out before anything
runs: a body that is not known part by part is left to its own forward. The parts are Triton kernels (`triton/layers.py`,
with gradients in `triton/gradients.py`); on a CPU the same families decode through `unrolled.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from legato.policy.layers.layer import is_plain, is_swiglu

FAMILIES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel", "MixtralModel")
"""Bodies of transformers whose layers are made of these parts; a mixture of experts keeps its own MLP."""

Norms = tuple[Tensor, Tensor, float]
"""Weights of the norms of queries and keys, and their epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """What the projections of a layer gave for R tokens, and what makes heads of it."""

    query: Tensor
    """[R, H * D]"""
    key: Tensor
    """[R, K * D]"""
    value: Tensor
    cosine: Tensor
    """[R, D]"""
    sine: Tensor
    norms: Norms | None
    width: int
    """D"""


Ready = Callable[[int, Projected], Tensor]
"""(layer, projections): make heads ready, store keys and values; queries [R, H, D]."""
Attend = Callable[[int, Tensor, float], Tensor]
"""(layer, queries [R, H, D], scaling) -> [R, H, D]; the new keys and values are stored already."""
AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
"""(residual, update, weight, epsilon) -> (residual + update, its norm)."""


def why_not(body: Any) -> str | None:
    """Why a body cannot be decoded through fused parts; None: it can."""
    name = type(body).__name__
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    for layer in body.layers:
        # Where the layers do not say (Mistral, Mixtral), the configuration does; no look at a few tokens would notice.
        if getattr(layer.self_attn, "sliding_window", getattr(body.config, "sliding_window", None)):
            return "it has a sliding window"
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, body.norm):
            if not type(norm).__name__.endswith("RMSNorm") or not hasattr(norm, "variance_epsilon"):
                return f"its norm is a {type(norm).__name__}"
        if is_swiglu(layer.mlp) and getattr(body.config, "hidden_act", "silu") != "silu":
            return f"its activation is {body.config.hidden_act}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the layers are made of beside their projections."""

    ready: Ready
    attend: Attend
    add_norm: AddNorm
    swiglu: Callable[[Tensor, Tensor], Tensor]
    whole: Callable[[Any, Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """For layers of plain projections (`layer.is_plain`): (layer, residual, update, cosine, sine) at once."""


def through(body: Any, tokens: Tensor, positions: Tensor, parts: Parts) -> Tensor:
    """The last hidden state [R, N] of R tokens at their positions: one per row in decoding, those of a pack in training."""
    residual = body.embed_tokens(tokens)
    cosine, sine = (angle[0].contiguous() for angle in body.rotary_emb(residual.unsqueeze(0), positions.unsqueeze(0)))
    update: Tensor | None = None
    for number, layer in enumerate(body.layers):
        given = (parts, number, layer, residual, update, cosine, sine)
        if getattr(layer, "gradient_checkpointing", False) and torch.is_grad_enabled():
            residual, update = checkpoint(_layer, *given, use_reentrant=False)
        else:
            residual, update = _layer(*given)
    _, out = parts.add_norm(residual, update, body.norm.weight, body.norm.variance_epsilon)
    return out


def _layer(
    parts: Parts, number: int, layer: Any, residual: Tensor, update: Tensor | None, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor]:
    """(residual, what is still to be added to it) after one layer."""
    if parts.whole is not None and is_plain(layer):
        return parts.whole(layer, residual, update, cosine, sine)
    attention, first, second = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
    residual, x = parts.add_norm(residual, update, first.weight, first.variance_epsilon)
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
    projected = Projected(
        query=attention.q_proj(x),
        key=attention.k_proj(x),
        value=attention.v_proj(x),
        cosine=cosine,
        sine=sine,
        norms=norms,
        width=attention.head_dim,
    )
    asked = parts.ready(number, projected)
    found = attention.o_proj(parts.attend(number, asked, attention.scaling).flatten(1))
    residual, x = parts.add_norm(residual, found, second.weight, second.variance_epsilon)
    mlp = layer.mlp
    if is_swiglu(mlp):
        return residual, mlp.down_proj(parts.swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
    said = mlp(x.unsqueeze(0))
    return residual, (said[0] if isinstance(said, tuple) else said)[0]
