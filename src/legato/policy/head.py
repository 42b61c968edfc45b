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
            return self._finished(torch.mm(hidden, self._weight().t(), out_dtype=torch.float32))
        logits = self(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def scored(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, at_once: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """[K] log-probs and entropies of the targets, differentiable in `hidden` and the weights.

        Where logits would be kept for more than `at_once` tokens, the backward computes them again.
        """
        if self.never_holds_logits(hidden):
            most = len(hidden) if at_once is None else at_once
            found: tuple[Tensor, Tensor] = _Exact.apply(  # type: ignore[no-untyped-call]
                hidden, self._weight(), targets, temperature, self.scale, self.softcap, most
            )
            return found
        return chosen(self(hidden), targets, temperature, with_entropy=True)

    def never_holds_logits(self, hidden: Tensor) -> bool:
        """Whether scoring without a gradient takes no memory for logits, whatever the number of tokens."""
        return self._accumulates(hidden)

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


class _Exact(torch.autograd.Function):
    """Forward and backward by hand (`triton/head.py`). Without a gradient to come, logits are kept nowhere."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        scale: float,
        softcap: float | None,
        at_once: int,
    ) -> tuple[Tensor, Tensor]:
        from legato.policy.triton.head import project

        hidden, ctx.at_once = hidden.contiguous(), at_once
        ctx.after = {"multiplier": scale, "softcap": softcap}
        learns = any(ctx.needs_input_grad[:2])
        found = project(hidden, weight, targets, temperature, keep=learns and len(hidden) <= at_once, **ctx.after)
        ctx.found = found if learns else None
        ctx.save_for_backward(hidden, weight, targets, temperature)
        ctx.set_materialize_grads(False)
        return found.logprobs, found.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from legato.policy.triton.head import project, slope

        hidden, weight, targets, temperature = ctx.saved_tensors
        towards, towards_entropy = gradients
        towards = torch.zeros_like(ctx.found.logprobs) if towards is None else towards
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for first in range(0, len(hidden), ctx.at_once):
            here = slice(first, first + ctx.at_once)
            found = ctx.found
            if found.distances is None:
                found = project(hidden[here], weight, targets[here], temperature[here], keep=True, **ctx.after)
            steer = None if towards_entropy is None else towards_entropy[here]
            at_product = slope(found, targets[here], towards[here], steer, **ctx.after)
            if to_hidden is not None:
                torch.mm(at_product, weight, out=to_hidden[here])
            if weight.requires_grad:
                _add_product(weight, at_product.t(), hidden[here])
        ctx.found = None
        return to_hidden, None, None, None, None, None, None


def _add_product(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """weight.grad += left right, in the dtype its gradient is kept in, without a second matrix of that size."""
    dtype = weight.grad_dtype or weight.dtype
    if dtype == left.dtype:
        weight.grad = torch.mm(left, right) if weight.grad is None else weight.grad.addmm_(left, right)
    elif weight.grad is None:
        weight.grad = torch.mm(left, right, out_dtype=dtype)
    else:
        torch.addmm(weight.grad, left, right, out_dtype=dtype, out=weight.grad)
