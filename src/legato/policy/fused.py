"""Decoding through fused layer parts, for families whose layers are built as Llama's are.

Per layer: norm, three projections, heads made ready and stored, attention, projection, norm with the residual, SwiGLU MLP.
The projections are the modules themselves (LoRA stays as it is). What a family does otherwise is found out before anything
runs: a body that is not known part by part is left to its own forward.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from legato.policy.triton.layers import add_norm, heads, swiglu

FAMILIES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel")
"""Bodies of transformers whose layers are made of these parts; a mixture of experts keeps its own MLP."""

Attend = Callable[[int, Tensor, float], Tensor]
"""(layer, queries [R, H, D], scaling) -> [R, H, D]; the new keys and values are in their slots already."""
Place = Callable[[int], tuple[Tensor, Tensor]]
"""layer -> the stores of its keys and values."""


def why_not(body: Any) -> str | None:
    """Why a body cannot be decoded through fused parts; None: it can."""
    name = type(body).__name__
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    for layer in body.layers:
        attention = layer.self_attn
        if getattr(attention, "sliding_window", None):
            return "it has a sliding window"
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, body.norm):
            if not type(norm).__name__.endswith("RMSNorm") or not hasattr(norm, "variance_epsilon"):
                return f"its norm is a {type(norm).__name__}"
        if _is_swiglu(layer.mlp) and getattr(body.config, "hidden_act", "silu") != "silu":
            return f"its activation is {body.config.hidden_act}"
    return None


def _is_swiglu(mlp: nn.Module) -> bool:
    return all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")) and not hasattr(mlp, "experts")


def decode(
    body: Any, tokens: Tensor, positions: Tensor, place: Place, attend: Attend, slots: Tensor, slot_length: Tensor
) -> Tensor:
    """The last hidden state [R, N] of one new token per row, [R] each."""
    residual = body.embed_tokens(tokens)
    cosine, sine = body.rotary_emb(residual.unsqueeze(1), positions.unsqueeze(1))
    cosine, sine = cosine[:, 0].contiguous(), sine[:, 0].contiguous()
    update: Tensor | None = None
    for number, layer in enumerate(body.layers):
        attention, first = layer.self_attn, layer.input_layernorm
        residual, x = add_norm(residual, update, first.weight, first.variance_epsilon)
        norms = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
        keys, values = place(number)
        asked = heads(
            attention.q_proj(x),
            attention.k_proj(x),
            attention.v_proj(x),
            cosine,
            sine,
            norms,
            keys,
            values,
            slots,
            slot_length,
            attention.head_dim,
        )
        found = attention.o_proj(attend(number, asked, attention.scaling).flatten(1))
        second = layer.post_attention_layernorm
        residual, x = add_norm(residual, found, second.weight, second.variance_epsilon)
        mlp = layer.mlp
        if _is_swiglu(mlp):
            update = mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
        else:
            said = mlp(x.unsqueeze(1))
            update = (said[0] if isinstance(said, tuple) else said)[:, 0]
    _, out = add_norm(residual, update, body.norm.weight, body.norm.variance_epsilon)
    return out
