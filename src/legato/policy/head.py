"""The head: from the last hidden state to log-probs and entropies of sampled tokens, logits held for a few rows at a time.

On a GPU with 16-bit weights the logits come from the float32 accumulators of the product (a 16-bit logit would spend GSPO's
band on rounding); the gradient products run in 16 bits, and the weight's gradient is added where it lies. Elsewhere autograd
does it: that form is the oracle of the other.

    dlogits = (1[v = y] - p) g / tau        dX = dlogits W        dW += dlogits^T X
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from legato.policy.logprobs import chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A linear layer, with what some families do after the matrix."""

    linear: nn.Module
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, body: Any) -> "Head":
        config = body.config
        # Granite divides by logits_scaling, Cohere multiplies by logit_scale, Gemma caps softly.
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        return cls(
            linear=body.get_output_embeddings(), scale=scale, softcap=getattr(config, "final_logit_softcapping", None)
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._finished(self.linear(hidden))

    def exact(self, hidden: Tensor) -> Tensor:
        """Logits in float32 or better without a gradient."""
        if self._accumulates(hidden):
            return self._finished(_product(hidden, self._weight()))
        logits = self(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def scored(self, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """[K] log-probs and entropies of the targets, differentiable in `hidden` and the weights."""
        if self._accumulates(hidden) and self.scale == 1.0 and self.softcap is None:
            found: tuple[Tensor, Tensor] = _Exact.apply(hidden, self._weight(), targets, temperature)  # type: ignore[no-untyped-call]
            return found
        return chosen(self(hidden), targets, temperature, with_entropy=True)

    def _weight(self) -> Tensor:
        weight: Tensor = self.linear.weight  # type: ignore[assignment]
        return weight

    def _accumulates(self, hidden: Tensor) -> bool:
        """Whether the device hands out float32 accumulators of a 16-bit product, and the layer is such a product."""
        plain = type(self.linear) is nn.Linear and self.linear.bias is None
        half = hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)
        return plain and half and find_spec("triton") is not None

    def _finished(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return product


class _Exact(torch.autograd.Function):
    """Forward and backward by hand: the logits are computed once, kept in float32, and read twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        from legato.policy.triton.head import statistics

        inverse = temperature.float().reciprocal()
        logits = _product(hidden, weight)
        normaliser, logprobs, entropy = statistics(logits, targets, inverse)
        ctx.save_for_backward(hidden, weight, logits, targets, inverse, normaliser, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from legato.policy.triton.head import slope

        hidden, weight, logits, targets, inverse, normaliser, entropy = ctx.saved_tensors
        towards, towards_entropy = gradients
        towards = torch.zeros_like(entropy) if towards is None else towards
        found = slope(logits, targets, inverse, normaliser, entropy, towards, towards_entropy, hidden.dtype)
        if weight.requires_grad:
            if weight.grad is None:
                weight.grad = torch.mm(found.t(), hidden)
            else:
                weight.grad.addmm_(found.t(), hidden)
        return torch.mm(found, weight), None, None, None
