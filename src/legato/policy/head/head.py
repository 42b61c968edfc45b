"""The LM head: log-probs and entropies of sampled tokens from the last hidden state, logits of a few rows at a time.

On a GPU with 16-bit weights, logits come from the float32 accumulators of the product: rounding them to 16 bits would be an
error as large as GSPO's clip range. The gradient products run in 16 bits, and the weight's gradient is accumulated in place.
Elsewhere autograd computes the gradient; tests compare the GPU path with it.

    dlogits = (1[v = y] - p) g / tau        dX = dlogits W        dW += dlogits^T X
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from legato.policy.head.logprobs import token_logprobs
from legato.policy.layers.accumulate import add_product, may_write_gradients
from legato.policy.layers.accumulate import product as weight_product


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer, with the scaling and soft-capping some families apply to logits."""

    linear: nn.Module
    scale: float
    softcap: float | None
    within: tuple[nn.Module, ...] = ()
    """The modules that contain the layer and may shard its weights."""

    @classmethod
    def from_body(cls, body: Any) -> "Head":
        config = body.config
        # Granite divides by logits_scaling, Cohere multiplies by logit_scale, Gemma caps softly.
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        return cls(
            linear=body.get_output_embeddings(),
            scale=scale,
            softcap=getattr(config, "final_logit_softcapping", None),
            within=(body,),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._scale_and_cap(self.linear(hidden))

    def exact(self, hidden: Tensor) -> Tensor:
        """Logits in float32 or float64, without a gradient."""
        product = self._product(hidden)
        if product is not None:
            logits = torch.mm(hidden, product.weight.t(), out_dtype=torch.float32)
            if product.beside is not None and product.added is not None:
                logits += torch.mm(product.beside, product.added.t(), out_dtype=torch.float32)
            return self._scale_and_cap(logits)
        logits = self(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def score(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, at_once: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """[K] log-probs and entropies of the targets, differentiable in `hidden` and the weights.

        On a GPU in 16 bits the backward adds to the weight's `.grad` itself, also under `torch.autograd.grad`, if
        `may_write_gradients`. With more than `at_once` tokens, logits are not kept and the backward recomputes them.
        """
        product = self._product(hidden)
        if product is not None:
            most = len(hidden) if at_once is None else at_once
            whole = hidden if product.beside is None else torch.cat([hidden, product.beside], 1)
            scores: tuple[Tensor, Tensor] = _Exact.apply(  # type: ignore[no-untyped-call]
                whole,
                product.weight,
                product.added,
                targets,
                temperature,
                self.scale,
                self.softcap,
                most,
                may_write_gradients([product.weight], self.linear, *self.within),
            )
            return scores
        return token_logprobs(self(hidden), targets, temperature, with_entropy=True)

    def never_holds_logits(self, hidden: Tensor) -> bool:
        """Whether scoring without a gradient takes no memory for logits, whatever the number of tokens."""
        # Called with no tokens: under LoRA `_product` would otherwise compute a product.
        return self._product(hidden[:0]) is not None

    def _product(self, hidden: Tensor) -> "_Product | None":
        """The layer as one plain matmul; None if it is not one or the GPU path is unavailable."""
        half = hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)
        return _product_of(self.linear, hidden) if half and find_spec("triton") is not None else None

    def _scale_and_cap(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """hidden weight^T, and under LoRA `beside` added^T on top: the same as one product of wider matrices."""

    weight: Tensor
    beside: Tensor | None = None
    added: Tensor | None = None


def _product_of(linear: nn.Module, hidden: Tensor) -> _Product | None:
    if type(linear) is nn.Linear:
        return _Product(weight=linear.weight) if linear.bias is None else None
    base, adapters = getattr(linear, "base_layer", None), getattr(linear, "active_adapters", ())
    if type(base) is not nn.Linear or base.bias is not None or len(adapters) != 1 or not hasattr(linear, "lora_A"):
        return None
    name = adapters[0]
    plain = isinstance(linear.lora_dropout[name], nn.Identity) and not getattr(linear, "lora_variant", {}).get(name)
    if linear.merged or not plain or linear.lora_A[name].weight.shape[0] % 8:
        return None
    # peft keeps adapters in float32 whatever the layer is in.
    down, up = linear.lora_A[name], linear.lora_B[name].weight
    beside = down(hidden.to(down.weight.dtype)) * linear.scaling[name]
    return _Product(weight=base.weight, beside=beside.to(hidden.dtype), added=up.to(hidden.dtype))


class _Exact(torch.autograd.Function):
    """Hand-written forward and backward (`kernels/head.py`). Without a gradient, logits are never stored."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        added: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        scale: float,
        softcap: float | None,
        at_once: int,
        writes: bool,
    ) -> tuple[Tensor, Tensor]:
        from legato.policy.kernels.head import project

        hidden, ctx.at_once, ctx.writes = hidden.contiguous(), at_once, writes
        whole = weight if added is None else torch.cat([weight, added], 1)
        ctx.after = {"multiplier": scale, "softcap": softcap}
        learns = any(ctx.needs_input_grad[:3])
        projection = project(hidden, whole, targets, temperature, keep=learns and len(hidden) <= at_once, **ctx.after)
        ctx.projection = None
        if learns:
            # Detached: an output held by its own function would never be freed if no backward runs.
            logprobs, entropy = projection.logprobs.detach(), projection.entropy.detach()
            ctx.projection = replace(projection, logprobs=logprobs, entropy=entropy)
        ctx.save_for_backward(hidden, weight, whole, targets, temperature)
        ctx.set_materialize_grads(False)
        return projection.logprobs, projection.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from legato.policy.kernels.head import project, project_backward

        hidden, weight, whole, targets, temperature = ctx.saved_tensors
        to_logprobs, to_entropy = gradients
        to_logprobs = torch.zeros_like(ctx.projection.logprobs) if to_logprobs is None else to_logprobs
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight, to_added, width = None, None, weight.shape[1]
        for first in range(0, len(hidden), ctx.at_once):
            here = slice(first, first + ctx.at_once)
            projection = ctx.projection
            if projection.distances is None:
                projection = project(hidden[here], whole, targets[here], temperature[here], keep=True, **ctx.after)
            here_entropy = None if to_entropy is None else to_entropy[here]
            to_product = project_backward(projection, targets[here], to_logprobs[here], here_entropy, **ctx.after)
            if to_hidden is not None:
                torch.mm(to_product, whole, out=to_hidden[here])
            if weight.requires_grad and ctx.writes:
                add_product(weight, to_product.t(), hidden[here, :width])
            elif weight.requires_grad:
                here_weight = weight_product(weight, to_product.t(), hidden[here, :width])
                to_weight = here_weight if to_weight is None else to_weight.add_(here_weight)
            if ctx.needs_input_grad[2]:
                here_added = to_product.t() @ hidden[here, width:]
                to_added = here_added if to_added is None else to_added + here_added
        ctx.projection = None
        return to_hidden, to_weight, to_added, None, None, None, None, None, None
