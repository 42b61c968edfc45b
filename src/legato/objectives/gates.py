"""Soft trust regions: a smooth function replaces the ratio."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from legato.core.bounded import choose
from legato.core.parts import number, part
from legato.objectives.slots import Context, Region, Trust


class _Gate(torch.autograd.Function):
    """(4 / tau) sigmoid(tau (exp(x) - 1)) with two saved tensors; autograd would save six."""

    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor, tau: Tensor) -> Tensor:
        value = log_ratio.exp().sub_(1).mul_(tau).sigmoid_().mul_(4 / tau)
        ctx.save_for_backward(log_ratio, tau, value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        log_ratio, tau, value = ctx.saved_tensors
        return _openness(value, tau).mul_(log_ratio.exp()).mul_(gradients[0]), None


def _openness(value: Tensor, tau: Tensor, out: Tensor | None = None) -> Tensor:
    """4 p (1 - p) for p = sigmoid(tau (r - 1)), from the gate's value 4 p / tau."""
    fourfold = torch.mul(value, tau, out=out if out is not None and out.shape == value.shape else None)
    return torch.addcmul(fourfold, fourfold, fourfold, value=-0.25, out=fourfold)


@part("trust", "soft-gate")
class SoftGate(Trust):
    """f(r) = (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A; the gradient is r sech^2(tau (r - 1) / 2) (SAPO).

    f(1) = 2 / tau, so losses are offset and not comparable with a clip's. The gradient factor is not monotone: it peaks
    at 1.57 (r = 2.06, tau 1), so moderately off-policy tokens are amplified.
    """

    role: ClassVar[Literal["gate"]] = "gate"
    tau_positive: float = number(default=1.0, says="Steepness where A > 0.", above=0.0)
    tau_negative: float = number(
        default=1.05, says="Steepness where A <= 0: a little more, negative updates fade faster.", above=0.0
    )

    def apply(self, region: Region, context: Context) -> Region:
        positive = context.signals.advantages > 0
        tau = choose(positive, self.tau_positive, self.tau_negative).to(region.log_value.dtype)
        value: Tensor = _Gate.apply(region.log_value, tau)  # type: ignore[no-untyped-call]
        return replace(region, value=value, gate=lambda out: _openness(value.detach(), tau, out))


@part("trust", "kernel")
class Kernel(Trust):
    """phi(W) = W^power exp(rate (1 - W)), by the sign of A; phi(1) = 1 (VESPO). Correction weights enter W."""

    role: ClassVar[Literal["gate"]] = "gate"
    folds_weights: ClassVar[bool] = True
    power_positive: float = number(default=2.0, says="Power where A >= 0.", minimum=0.0)
    rate_positive: float = number(default=3.0, says="Decay where A >= 0.", minimum=0.0)
    power_negative: float = number(default=3.0, says="Power where A < 0.", minimum=0.0)
    rate_negative: float = number(default=2.0, says="Decay where A < 0.", minimum=0.0)

    def apply(self, region: Region, context: Context) -> Region:
        negative, dtype = context.signals.advantages < 0, region.log_value.dtype
        power = choose(negative, self.power_negative, self.power_positive).to(dtype)
        rate = choose(negative, self.rate_negative, self.rate_positive).to(dtype)
        product = region.log_value.exp()
        value = torch.exp(power * region.log_value + rate * (1 - product))
        return replace(region, value=value, gate=lambda _: value.detach() / product.detach().clamp(min=1e-30))
