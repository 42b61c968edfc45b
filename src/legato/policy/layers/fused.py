"""Runs the body of Llama-like families through fused layer parts, in decoding and in training.

Per layer: norm, three projections, heads normed and rotated, attention, projection, norm with the residual, SwiGLU MLP.
The projections are the model's own modules, so LoRA works unchanged. `why_not` checks every part of a body before it runs;
a body with an unknown part uses its own forward. The parts are Triton kernels (`kernels/layers.py`, with gradients in
`kernels/gradients.py`); on a CPU the same families decode through `unrolled.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from legato.policy.layers.accumulate import is_sharded, may_write_gradients, own_class
from legato.policy.layers.layer import has_hooks, is_plain, is_swiglu, weights_of

FAMILIES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel", "MixtralModel", "OlmoeModel")
"""Bodies of transformers whose layers consist of these parts; a mixture of experts keeps its own MLP."""

Norms = tuple[Tensor, Tensor, float]
"""Weights of the norms of queries and keys, and their epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """The projections of a layer for R tokens, with the angles and norms that turn them into heads."""

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
"""(layer, projections): norm and rotate the heads, store keys and values; returns queries [R, H, D]."""
Attend = Callable[[int, Tensor, float], Tensor]
"""(layer, queries [R, H, D], scaling) -> [R, H, D]; the new keys and values are stored already."""
AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
"""(residual, update, weight, epsilon) -> (residual + update, RMSNorm of that sum)."""


def why_not(body: Any) -> str | None:
    """Why a body cannot run through fused parts; None if it can."""
    name = own_class(body).__name__
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    for layer in body.layers:
        # Mistral and Mixtral set the window in the configuration only. A comparison on a few tokens would not notice it.
        if getattr(layer.self_attn, "sliding_window", getattr(body.config, "sliding_window", None)):
            return "it has a sliding window"
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, body.norm):
            if not type(norm).__name__.endswith("RMSNorm") or not hasattr(norm, "variance_epsilon"):
                return f"its norm is a {type(norm).__name__}"
        if getattr(body.config, "clip_qkv", None) is not None:
            return "it clips queries, keys and values"
        if "forward" in vars(layer):
            return "the forward of one of its layers was replaced"
        inside = [layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm]
        if any(has_hooks(module) for module in [*inside, *([layer.mlp] if is_swiglu(layer.mlp) else [])]):
            return "a module inside one of its layers has hooks, which would not be called"
        if is_swiglu(layer.mlp) and getattr(body.config, "hidden_act", "silu") != "silu":
            return f"its activation is {body.config.hidden_act}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The functions that a layer calls besides its projections."""

    ready: Ready
    attend: Attend
    add_norm: AddNorm
    swiglu: Callable[[Tensor, Tensor], Tensor]
    project: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__
    """(projection, input) -> output. `policy.layers.products` has one whose rows do not depend on the batch."""
    project_many: Callable[[Sequence[nn.Module], Tensor], tuple[Tensor, ...]] | None = None
    """(projections, their input) -> outputs, which may be columns of one tensor; None: each by `project`."""
    whole: Callable[[Any, Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Runs a layer of plain projections (`layer.is_plain`) in one call: (layer, residual, update, cosine, sine).

    Its backward writes gradients itself. Layers whose gradients autograd must compute run part by part.
    """


@contextmanager
def run_body(body: Any, tokens: Tensor, positions: Tensor, parts: Parts) -> Iterator[Tensor]:
    """The last hidden state [R, N] of R tokens at their positions: one per row in decoding, those of a pack in training.

    Layers are called as modules, so that their hooks fire; inside the context their `forward` is the fused one. Run the
    backward inside the context too: gradient checkpointing calls the layers again. A body that FSDP2 divides is called as a
    module too: its hooks prepare those of the layers.
    """
    changed = [*body.layers, *([body] if is_sharded(body) else [])]
    for number, layer in enumerate(body.layers):
        layer.forward = partial(_layer_forward, parts, number, body, layer)
    if is_sharded(body):
        body.forward = partial(_last_hidden_state, parts, body)
    try:
        yield body(tokens, positions) if is_sharded(body) else _last_hidden_state(parts, body, tokens, positions)
    finally:
        for module in changed:
            del module.forward  # the one of its class again


def run_body_without_backward(body: Any, tokens: Tensor, positions: Tensor, parts: Parts) -> Tensor:
    """The last hidden state [R, N], like `run_body`, for callers that run no backward."""
    with run_body(body, tokens, positions, parts) as hidden:
        return hidden


def _last_hidden_state(parts: Parts, body: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    residual = body.embed_tokens(tokens)
    cosine, sine = (angle[0].contiguous() for angle in body.rotary_emb(residual.unsqueeze(0), positions.unsqueeze(0)))
    update: Tensor | None = None
    for layer in body.layers:
        if update is not None and has_hooks(layer):
            # A hook at a layer sees its hidden state as one tensor, as in transformers.
            residual, update = residual + update, None
        output = _call(layer, residual, update, cosine, sine)
        residual, update = output if isinstance(output, tuple) else (output, None)
    _, out = parts.add_norm(residual, update, body.norm.weight, body.norm.variance_epsilon)
    return out


def head_norms(attention: Any) -> Norms | None:
    """The norms of single heads of queries and keys; None if there are none, or if they are over all heads together."""
    if not hasattr(attention, "q_norm") or len(attention.q_norm.weight) != attention.head_dim:
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


def _call(layer: Any, *inputs: Tensor | None) -> Any:
    """Call a layer. Gradient checkpointing happens here: transformers' layers do it inside `__call__`.

    Without a gradient nothing is recomputed, and the states of random generators need not be saved.
    """
    return layer(*inputs) if torch.is_grad_enabled() else nn.Module.__call__(layer, *inputs)


def _layer_forward(
    parts: Parts,
    number: int,
    body: Any,
    layer: Any,
    residual: Tensor,
    update: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
) -> tuple[Tensor, Tensor] | Tensor:
    """The forward of a layer: (residual, update not added yet), or their sum where the layer has hooks."""
    output = _compute_layer(parts, number, body, layer, residual, update, cosine, sine)
    return output[0] + output[1] if has_hooks(layer) else output


def _compute_layer(
    parts: Parts,
    number: int,
    body: Any,
    layer: Any,
    residual: Tensor,
    update: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
) -> tuple[Tensor, Tensor]:
    if parts.whole is not None and is_plain(layer) and may_write_gradients(weights_of(layer), layer, body):
        return parts.whole(layer, residual, update, cosine, sine)
    attention, first, second = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
    residual, x = parts.add_norm(residual, update, first.weight, first.variance_epsilon)
    norms = head_norms(attention)
    wide = norms is None and hasattr(attention, "q_norm")
    # A norm over all heads reads whole rows, so its input is a tensor of its own.
    query, key, value = _project(parts, (attention.q_proj, attention.k_proj, attention.v_proj), x, apart=wide)
    if wide:
        # OLMoE: one norm over all heads.
        _, query = parts.add_norm(query, None, attention.q_norm.weight, attention.q_norm.variance_epsilon)
        _, key = parts.add_norm(key, None, attention.k_norm.weight, attention.k_norm.variance_epsilon)
    projected = Projected(
        query=query,
        key=key,
        value=value,
        cosine=cosine,
        sine=sine,
        norms=norms,
        width=attention.head_dim,
    )
    query = parts.ready(number, projected)
    attended = parts.project(attention.o_proj, parts.attend(number, query, attention.scaling).flatten(1))
    residual, x = parts.add_norm(residual, attended, second.weight, second.variance_epsilon)
    mlp = layer.mlp
    if is_swiglu(mlp):
        product = parts.swiglu(*_project(parts, (mlp.gate_proj, mlp.up_proj), x))
        return residual, parts.project(mlp.down_proj, product)
    output = mlp(x.unsqueeze(0))
    return residual, (output[0] if isinstance(output, tuple) else output)[0]


def _project(parts: Parts, modules: Sequence[nn.Module], x: Tensor, *, apart: bool = False) -> tuple[Tensor, ...]:
    """The outputs of projections that read the same input; `apart`: each is a tensor of its own."""
    if parts.project_many is None or apart:
        return tuple(parts.project(module, x) for module in modules)
    return parts.project_many(modules, x)
