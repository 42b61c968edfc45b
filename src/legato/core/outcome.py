"""The result of an objective: the scalar loss, and the coefficients that give its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.segments import Level
from legato.core.shapes import PerToken, Scalar, Spread
from legato.core.sums import Sums
from legato.errors import InputError


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *channels_and_coefficients: Tensor | None) -> Tensor:
        half = len(channels_and_coefficients) // 2
        ctx.save_for_backward(*channels_and_coefficients[half:])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        coefficients: tuple[Tensor | None, ...] = ctx.saved_tensors
        towards_channels = tuple(None if c is None else c * -gradients[0] for c in coefficients)
        return None, *towards_channels, *(None for _ in coefficients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Minus the derivative of the loss with respect to each channel, all penalties included; None where unused."""

    logprobs: PerToken
    entropy: PerToken | None = None
    values: PerToken | None = None

    def rows(self, index: Any) -> Coefficients:
        """The coefficients of some rows: an update computes them once and passes each micro-batch its rows."""
        return Coefficients(
            logprobs=self.logprobs[index],
            entropy=None if self.entropy is None else self.entropy[index],
            values=None if self.values is None else self.values[index],
        )

    def tie(
        self, loss: Scalar, *, logprobs: PerToken, entropy: PerToken | None = None, values: PerToken | None = None
    ) -> Scalar:
        """`loss` with a backward that passes minus the coefficients to these channels as their gradient."""
        for name, coefficients, channel in (("entropy", self.entropy, entropy), ("values", self.values, values)):
            if coefficients is not None and channel is None:
                raise InputError(f"these coefficients have a gradient for {name}; pass {name}= to tie, or it would be lost")
        tied: Tensor = _Tie.apply(  # type: ignore[no-untyped-call]
            loss, logprobs, entropy, values, self.logprobs, self.entropy, self.values
        )
        return tied


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Intermediate results of an objective, detached, from which diagnostics compute metrics."""

    log_ratio: Spread
    """log of the ratio at the objective's own level, before any trust region."""
    tokens: PerToken | None
    """new - old of each token as the ratio reads it, bounded by its limit; None if the ratio reads something else."""
    log_value: Spread
    """log_ratio after the clips. Where the two differ, the term has no gradient."""
    selected: Spread | None
    """0/1: the terms the trust region kept; None if no part drops terms."""
    tokens_clipped: Tensor | None
    """[B, T] bool: tokens bounded before the mean was taken; None if no part bounds tokens."""
    bounded: bool
    """Whether there is a trust region at all."""
    band: tuple[Tensor | float, Tensor | float] | None
    """Lower and upper bound on log_ratio whatever the sign of the advantage; None where there is no such band."""
    gate: Callable[[Tensor], Spread] | None
    """Soft trust regions: computes the factor that damps the gradient. Its argument is scratch space, used if it fits."""
    weight: Spread | None
    """Product of the correction weights."""
    kept: Spread | None
    """1 where filters and rejection kept the policy term; None if there are none."""
    zero_outside: bool
    """Whether log_ratio is 0 outside the mask: per-token ratios are, a response's own number spread over its row is not."""
    value_clip: float | None
    """How far a value may move before its loss is clipped."""
    level: Level
    """What log_ratio has one number for: each token, turn or response."""
    adapts: bool
    """Whether the band follows the updates."""
    terms: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """The named terms of the loss, each already normalised by the counts; they add up to the loss."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome:
    """The result of an objective on one call."""

    loss: Scalar
    """Tied to the caller's channels: `loss.backward()` passes them minus the coefficients."""
    field: Coefficients
    trace: Trace
    sums: Sums = dataclasses.field(default_factory=Sums)
    """The sums behind the metrics: tensors that combine over micro-batches and ranks."""

    def __repr__(self) -> str:
        rows, width = self.coefficients.shape
        return f"Outcome(loss={float(self.loss.detach()):.6g}, coefficients=[{rows}, {width}], metrics={len(self.sums)})"

    @property
    def coefficients(self) -> PerToken:
        """Minus dLoss/dlogprobs."""
        return self.field.logprobs

    @property
    def entropy_coefficients(self) -> PerToken | None:
        return self.field.entropy

    @property
    def value_coefficients(self) -> PerToken | None:
        return self.field.values

    @property
    def metrics(self) -> dict[str, float]:
        """The sums as numbers. Only this call waits for the device."""
        return self.sums.report()
