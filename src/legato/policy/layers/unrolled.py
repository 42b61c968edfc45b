"""The body of a known family (`fused.py`) as plain torch calls, for engines on a CPU. It has no backward.

Per layer: norm, one product for queries, keys and values, rotation, attention, product with the residual added, norm, SwiGLU
MLP with the residual added.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from legato.policy.head.head import Head
from legato.policy.layers.fused import Norms, head_norms, why_not
from legato.policy.layers.layer import has_hooks, is_swiglu
from legato.policy.layers.reordered import MOST_BYTES, Product, bytes_of_copies, product

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, queries [N, H, D], keys [N, K, D], values [N, K, D], scaling) -> [N, H * D]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    first: tuple[Tensor, float]
    """A norm: its weight and its epsilon."""
    heads: Product
    """Queries, keys and values side by side."""
    norms: Norms | None
    """Norms of single heads."""
    wide_norms: Norms | None
    """Norms over all heads of queries and all of keys (OLMoE)."""
    queries: int
    """How many of the heads are queries."""
    rotated: int
    """How many are queries or keys."""
    width: int
    scaling: float
    out: Product
    second: tuple[Tensor, float]
    mlp: "tuple[Product, Product, Product] | nn.Module"
    """Gate, up and down of a SwiGLU MLP; any other MLP (experts) is called as a module."""


def _layer(layer: Any, config: Any, copied: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    if is_swiglu(mlp):
        gate, up, down = (product(part, copied=copied) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        mlp = gate, up, down
    return _Layer(
        first=_norm(layer.input_layernorm),
        heads=product(attention.q_proj, attention.k_proj, attention.v_proj, copied=copied),
        norms=head_norms(attention),
        wide_norms=_wide_norms(attention),
        queries=config.num_attention_heads,
        rotated=config.num_attention_heads + config.num_key_value_heads,
        width=attention.head_dim,
        scaling=attention.scaling,
        out=product(attention.o_proj, copied=copied),
        second=_norm(layer.post_attention_layernorm),
        mlp=mlp,
    )


def _wide_norms(attention: Any) -> Norms | None:
    if not hasattr(attention, "q_norm") or head_norms(attention) is not None:
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


def _norm(norm: Any) -> tuple[Tensor, float]:
    return norm.weight, norm.variance_epsilon


class Unrolled:
    """A body for the duration of one call. It may hold copies of the weights, made when it was built."""

    def __init__(self, model: Any) -> None:
        self.decoder = model.get_decoder()
        self.copied_bytes = bytes_of_copies(model)
        if self.copied_bytes > MOST_BYTES:
            self.copied_bytes = 0
        copied = self.copied_bytes > 0
        self.layers = [_layer(layer, self.decoder.config, copied) for layer in self.decoder.layers]
        head = Head.from_body(model)
        self.head = replace(head, linear=product(head.linear, copied=copied))

    @staticmethod
    def serves(model: Any) -> bool:
        """Whether this class can run the model: a known family on a CPU, in float32 or float64, without hooks at layers."""
        weight = model.get_input_embeddings().weight
        wide = weight.dtype in (torch.float32, torch.float64)
        if weight.device.type != "cpu" or not wide or why_not(model.get_decoder()) is not None:
            return False
        # Layers are not called as modules here, so their hooks would not fire.
        return not any(has_hooks(layer) for layer in model.get_decoder().layers)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """The last hidden state [N, width of the body] of N tokens; `wanted`: indices of the tokens whose state is needed.

        The last layer computes only keys and values of the other tokens: in a body of four layers that saves a fifth.
        """
        residual = self.decoder.embed_tokens(tokens)
        cosine, sine = self.decoder.rotary_emb(residual.unsqueeze(0), positions.unsqueeze(0))
        # Rotary embedding: each half of a head is rotated by the other half, the first with the sign changed.
        low, high = sine[0].chunk(2, 1)
        rotation = cosine[0].unsqueeze(1), torch.cat([-low, high], 1).unsqueeze(1)
        for number, layer in enumerate(self.layers):
            query, key, value = _project_heads(layer, _apply_norm(residual, layer.first), *rotation)
            attended = attend(number, query, key, value, layer.scaling)
            if wanted is not None and number == len(self.layers) - 1:
                attended, residual = attended[wanted], residual[wanted]
            residual = layer.out.plus(attended, residual)
            x = _apply_norm(residual, layer.second)
            if isinstance(layer.mlp, tuple):
                gate, up, down = layer.mlp
                residual = down.plus(up.times(x, gate.silu_of(x)), residual)
            else:
                output = layer.mlp(x.unsqueeze(1))
                residual = residual + (output[0] if isinstance(output, tuple) else output)[:, 0]
        return _apply_norm(residual, _norm(self.decoder.norm))


def _apply_norm(x: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    return rms_norm(x, (x.shape[1],), *norm)


def _project_heads(layer: _Layer, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as heads; queries and keys are normed (if the family does that) and rotated."""
    width, queries = layer.width, layer.queries
    heads = layer.heads(x).reshape(len(x), -1, width)
    both = heads[:, : layer.rotated]
    if layer.wide_norms is not None:
        epsilon = layer.wide_norms[2]
        parts = (both[:, :queries].flatten(1), layer.wide_norms[0]), (both[:, queries:].flatten(1), layer.wide_norms[1])
        both = torch.cat([rms_norm(part, part.shape[1:], weight, epsilon) for part, weight in parts], 1).reshape(both.shape)
    elif layer.norms is not None:
        query, key = both[:, :queries], both[:, queries:]
        epsilon = layer.norms[2]
        both = torch.cat(
            [rms_norm(query, (width,), layer.norms[0], epsilon), rms_norm(key, (width,), layer.norms[1], epsilon)], 1
        )
    both = (both * cosine).addcmul_(both.roll(width // 2, -1), sine)
    return both[:, :queries], both[:, queries:], heads[:, layer.rotated :]
