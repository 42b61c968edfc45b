"""A decoder layer of plain projections as one autograd function with a hand-written backward.

Autograd through the same parts (`fused.py`) saves the inputs of every part. Here the backward recomputes norms, rotated
heads and the MLP's product, which saves a third of that memory. The matrix products accumulate weight gradients in float32.
The forward calls the same parts as `fused.py`, so both compute the same bits.

    t = residual + update      x = norm(t)      a = attention(rotate(q), rotate(k), v)      u = t + a Wo^T
    y = norm(u)                out = (silu(g) p) Wd^T,   g = y Wg^T,   p = y Wu^T       returns (u, out)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from legato.policy.layers import products
from legato.policy.layers.accumulate import add_gradient, add_product
from legato.policy.layout.spans import Spans

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_MLP_NAMES = frozenset(_MLP)


def is_swiglu(mlp: nn.Module) -> bool:
    """Whether an MLP is down(silu(gate) * up) and nothing else."""
    return mlp._modules.keys() >= _MLP_NAMES and not hasattr(mlp, "experts")


def is_plain(layer: Any) -> bool:
    """Whether every projection is a linear layer and nothing else: no adapter, no hook, a bias at most on q, k and v."""
    attention, mlp = layer.self_attn, layer.mlp
    if not is_swiglu(mlp):
        return False
    # Reads the tables of modules and parameters: this runs for every layer of every pack, and attributes are slow.
    for place, module in enumerate([*map(attention._modules.get, _PROJECTIONS), *map(mlp._modules.get, _MLP)]):
        if type(module) is not nn.Linear or has_hooks(module) or (place >= 3 and module._parameters["bias"] is not None):
            return False
    return True


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def weights_of(layer: Any) -> list[Tensor | None]:
    """The weights of a layer that `is_plain`, in the order `run_plain_layer` takes them; None for weights it lacks."""
    inside: Any = layer._modules
    attention, mlp = inside["self_attn"]._modules, inside["mlp"]._modules
    projections = [*map(attention.__getitem__, _PROJECTIONS), *map(mlp.__getitem__, _MLP)]
    norms = [inside["input_layernorm"], inside["post_attention_layernorm"], attention.get("q_norm"), attention.get("k_norm")]
    weights = [None if module is None else module._parameters["weight"] for module in [*norms, *projections]]
    return weights + [module._parameters["bias"] for module in projections[:3]]


def run_plain_layer(
    layer: Any,
    residual: Tensor,
    update: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    spans: Spans,
    *,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run a layer that `is_plain` on the tokens of a pack; returns (residual, update), where the update is not added yet.

    With `exact` the bits of a token do not depend on how many tokens the pack has (`products.py`).
    """
    attention = layer.self_attn
    query_norm = getattr(attention, "q_norm", None)
    options = _Options(
        spans=spans,
        width=attention.head_dim,
        scaling=attention.scaling,
        first=layer.input_layernorm.variance_epsilon,
        heads=0.0 if query_norm is None else query_norm.variance_epsilon,
        second=layer.post_attention_layernorm.variance_epsilon,
        exact=exact,
    )
    output: tuple[Tensor, Tensor] = _Layer.apply(  # type: ignore[no-untyped-call]
        options,
        residual,
        update,
        cosine,
        sine,
        *weights_of(layer),
    )
    return output


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    spans: Spans
    width: int
    scaling: float
    first: float
    """Epsilons: of the norm before attention, of the heads' norms (`heads`), of the norm before the MLP (`second`)."""
    heads: float
    second: float
    exact: bool


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        residual: Tensor,
        update: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        *weights: Any,
    ) -> tuple[Tensor, Tensor]:
        from legato.policy.kernels.layers import add_norm, swiglu

        linear = products.linear if options.exact else nn.functional.linear
        first_norm, second_norm, query_norm, key_norm, wq, wk, wv, wo, wg, wu, wd, bq, bk, bv = weights
        total, x = add_norm(residual, update, first_norm, options.first)
        query, key, value = linear(x, wq, bq), linear(x, wk, bk), linear(x, wv, bv)
        del x
        queries, keys, values = _heads(options, query, key, value, cosine, sine, query_norm, key_norm)
        attended, normaliser = options.spans.attend_forward(queries, keys, values, options.scaling, None)
        after, y = add_norm(total, linear(attended.flatten(1), wo), second_norm, options.second)
        gate, up = linear(y, wg), linear(y, wu)
        out = linear(swiglu(gate, up), wd)
        # Saved as attributes: `save_for_backward` under gradient checkpointing returns copies, whose `.grad` nobody reads.
        ctx.options, ctx.adds, ctx.weights = options, update is not None, weights
        ctx.save_for_backward(total, query, key, value, attended, after, gate, up, cosine, sine, normaliser)
        ctx.set_materialize_grads(False)
        return after, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_after: Tensor | None, to_out: Tensor | None) -> tuple[Tensor | None, ...]:
        from legato.policy.kernels.gradients import norm_backward, recompute_swiglu_and_backward, rotate_backward

        options: _Options = ctx.options
        total, query, key, value, attended, after, gate, up, cosine, sine, normaliser = ctx.saved_tensors
        first_norm, second_norm, query_norm, key_norm, wq, wk, wv, wo, wg, wu, wd, bq, bk, bv = ctx.weights
        nothing = (None,) * (5 + len(ctx.weights))
        if to_out is None:
            if to_after is None:
                return nothing
            to_out = torch.zeros_like(after)

        product, to_gate, to_up = recompute_swiglu_and_backward(gate, up, to_out @ wd)
        _add_projection(wd, to_out, product)
        del product
        to_y = (to_gate @ wg).addmm_(to_up, wu)
        y, learns = torch.empty_like(after), second_norm.requires_grad
        to_after, to_norm = norm_backward(after, second_norm, options.second, to_y, to_after, learns=learns, out=y)
        del to_y
        _add_vector(second_norm, to_norm)
        _add_projection(wg, to_gate, y)
        _add_projection(wu, to_up, y)
        del to_gate, to_up, y

        _add_projection(wo, to_after, attended.flatten(1))
        to_attended = (to_after @ wo).view_as(attended)
        heads = _heads(options, query, key, value, cosine, sine, query_norm, key_norm)
        to_queries, to_keys, to_values = options.spans.attend_backward(
            *heads, attended, normaliser, to_attended, options.scaling, None
        )
        del heads, to_attended
        angles, learns = (cosine, sine), query_norm is not None and query_norm.requires_grad
        to_query, to_query_norm = rotate_backward(query, *angles, query_norm, options.heads, to_queries, learns=learns)
        learns = key_norm is not None and key_norm.requires_grad
        to_key, to_key_norm = rotate_backward(key, *angles, key_norm, options.heads, to_keys, learns=learns)
        _add_vector(query_norm, to_query_norm)
        _add_vector(key_norm, to_key_norm)
        to_value = to_values.flatten(1)

        to_x = (to_query @ wq).addmm_(to_key, wk).addmm_(to_value, wv)
        x, learns = torch.empty_like(total), first_norm.requires_grad
        to_total, to_norm = norm_backward(total, first_norm, options.first, to_x, to_after, learns=learns, out=x)
        del to_x
        _add_vector(first_norm, to_norm)
        for weight, bias, towards in ((wq, bq, to_query), (wk, bk, to_key), (wv, bv, to_value)):
            _add_projection(weight, towards, x)
            if bias is not None and bias.requires_grad:
                add_gradient(bias, towards.sum(0, dtype=torch.float32))
        return None, to_total, to_total if ctx.adds else None, *nothing[3:]


def _heads(
    options: _Options,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, heads, D] ready for attention."""
    from legato.policy.kernels.gradients import rotate_forward

    queries = rotate_forward(query, cosine, sine, query_norm, options.heads, options.width)
    keys = rotate_forward(key, cosine, sine, key_norm, options.heads, options.width)
    return queries, keys, value.view(len(value), -1, options.width)


def _add_projection(weight: Tensor, to_output: Tensor, inputs: Tensor) -> None:
    """Add the gradient of the weight of a projection `inputs weight^T`; `to_output` is the gradient of its output."""
    if weight.requires_grad:
        add_product(weight, to_output.t(), inputs)


def _add_vector(weight: Tensor | None, gradient: Tensor | None) -> None:
    if weight is not None and gradient is not None:
        add_gradient(weight, gradient)
