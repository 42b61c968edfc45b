"""Trust regions that bound the ratio.

PPO's min(r A, clamp(r) A) is one-sided by the sign of A: the ratio is bounded above where A > 0 and below where A < 0, and
a bounded ratio has zero gradient. Bounds are applied to log r: log1p keeps 3e-4 exact in float32 and exp cannot overflow
on its way to a clip.
"""

import math
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from legato.core.bounded import bounded, choose
from legato.core.parts import check_order, choice, number, part
from legato.core.scope import Scope
from legato.core.shapes import PerToken, Spread
from legato.errors import InputError
from legato.objectives.slots import Bounds, Context, PartState, Region, TokenTrust, Trust

_SCALE = "'none': one band for all; 'sqrt-length': wider for shorter segments."


def by_sign(values: Spread, advantages: Spread, lower: Tensor | float, upper: Tensor | float) -> Spread:
    """Bound values above where the advantage is positive, below where it is negative, and not at all where it is 0."""
    return bounded(
        values,
        choose(advantages < 0, lower, -math.inf),
        choose(advantages > 0, upper, math.inf),
    )


def log_band(low: Tensor | float, high: Tensor | float) -> tuple[Tensor | float, Tensor | float]:
    """log(1 - low), log(1 + high); a low of 1 or more is no lower bound."""
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        return torch.log1p(-low.clamp(max=1.0)), torch.log1p(high)
    assert not isinstance(low, Tensor) and not isinstance(high, Tensor)
    return (math.log1p(-low) if low < 1 else -math.inf), math.log1p(high)


@part("trust", "clip")
class Clip(Trust):
    """min(r A, clamp(r, 1 - low, 1 + high) A): zero gradient beyond, on the side the advantage pushes to."""

    role: ClassVar[Literal["clip"]] = "clip"
    low: float = number(default=0.2, says="Distance of the lower bound from 1.", minimum=0.0, infinite=True)
    high: float = number(default=0.2, says="Distance of the upper bound from 1.", minimum=0.0, infinite=True)
    scale: str = choice("none", "sqrt-length", default="none", says=_SCALE)
    reference_length: float = number(
        default=2048.0, says="Length at which low and high hold under 'sqrt-length'.", above=0.0
    )

    def __post_init__(self) -> None:
        if 1 < self.low < math.inf:
            raise InputError(
                "trust 'clip'.low: expected at most 1 (a distance from 1; no ratio is below 0) or inf for no bound, got"
                f" {self.low:g}"
            )

    def bounds(self, state: PartState | None) -> Bounds:
        return Bounds(low=self.low, high=self.high, fields=("low", "high"))

    def apply(self, region: Region, context: Context) -> Region:
        low: Tensor | float = self.low
        high: Tensor | float = self.high
        if self.scale == "sqrt-length":
            factor = (self.reference_length / context.segments.size().clamp(min=1)).sqrt()
            low, high = self.low * factor, self.high * factor
        lower, upper = log_band(low, high)
        clipped = by_sign(region.log_value, context.signals.advantages, lower, upper)
        return replace(region, log_value=clipped, band=(lower, upper))


@part("trust", "log-clip")
class LogClip(Trust):
    """The same with bounds on log r; with 'sqrt-length' they grow with sqrt(L), fair to a product of L ratios (FSPO)."""

    role: ClassVar[Literal["clip"]] = "clip"
    log_low: float | None = number(default=None, says="Bound below, as -log r; must be given.", minimum=0.0, optional=True)
    log_high: float | None = number(default=None, says="Bound above, as log r; must be given.", minimum=0.0, optional=True)
    scale: str = choice("none", "sqrt-length", default="none", says="'none', or 'sqrt-length': bounds times sqrt(L).")

    def bounds(self, state: PartState | None) -> Bounds:
        if self.log_low is None or self.log_high is None:
            return Bounds(low=None, high=None)
        return Bounds(low=self.log_low, high=self.log_high, logarithmic=True, fields=("log_low", "log_high"))

    def apply(self, region: Region, context: Context) -> Region:
        if self.log_low is None or self.log_high is None:
            raise InputError(
                "trust 'log-clip' has no bounds: log_low and log_high must be given (the paper's constants are not"
                ' verified), for instance {"objective.trust.log-clip.log_low": 0.05, "...log_high": 0.06}'
            )
        lower: Tensor | float = -self.log_low
        upper: Tensor | float = self.log_high
        if self.scale == "sqrt-length":
            root = context.segments.size().sqrt()
            lower, upper = lower * root, upper * root
        clipped = by_sign(region.log_value, context.signals.advantages, lower, upper)
        return replace(region, log_value=clipped, band=(lower, upper))


@part("trust", "token-log-clip")
class TokenLogClip(TokenTrust):
    """Each token's log-ratio bounded by the sign of A before the mean is taken (GMPO); the mean keeps the true length."""

    role: ClassVar[Literal["clip"]] = "clip"
    log_low: float = number(default=0.4, says="Bound below on a token, as -log w.", minimum=0.0, infinite=True)
    log_high: float = number(default=0.4, says="Bound above on a token, as log w.", minimum=0.0, infinite=True)

    def bounds(self, state: PartState | None) -> Bounds:
        return Bounds(low=self.log_low, high=self.log_high, logarithmic=True, of="tokens", fields=("log_low", "log_high"))

    def apply_tokens(self, tokens: PerToken, context: Context) -> PerToken:
        return by_sign(tokens, context.signals.advantages, -self.log_low, self.log_high)


@part("trust", "dual-clip")
class DualClip(Trust):
    """Where A < 0 the ratio is also bounded above, at cap: a bad token that became likely cannot dominate the gradient."""

    role: ClassVar[Literal["clip"]] = "clip"
    in_tables: ClassVar[tuple[str, ...]] = ("cap",)
    cap: float = number(default=3.0, says="Largest ratio where A < 0.", above=1.0)

    def apply(self, region: Region, context: Context) -> Region:
        upper = choose(context.signals.advantages < 0, math.log(self.cap), math.inf)
        return replace(region, log_value=bounded(region.log_value, None, upper))


@part("trust", "weight-clip")
class WeightClip(Trust):
    """The ratio as a weight, bounded on both sides whatever the sign of A; no token is dropped (CISPO)."""

    role: ClassVar[Literal["clip"]] = "clip"
    weight_form_only: ClassVar[bool] = True
    in_tables: ClassVar[tuple[str, ...]] = ("cap",)
    cap: float = number(default=5.0, says="Largest weight.", above=0.0, infinite=True)
    floor: float = number(default=0.0, says="Smallest weight; 0 is no floor.", minimum=0.0)

    def __post_init__(self) -> None:
        check_order(self, "floor", "cap")

    def apply(self, region: Region, context: Context) -> Region:
        lower = math.log(self.floor) if self.floor > 0 else None
        return replace(region, log_value=bounded(region.log_value, lower, math.log(self.cap)))


@part("trust", "mask")
class PredicateMask(Trust):
    """A token is dropped exactly where PPO's clip would have zero gradient; the others keep their ratio (MiniRL)."""

    low: float = number(default=0.2, says="Distance of the lower bound from 1.", minimum=0.0, infinite=True)
    high: float = number(default=0.27, says="Distance of the upper bound from 1.", minimum=0.0, infinite=True)

    def bounds(self, state: PartState | None) -> Bounds:
        return Bounds(low=self.low, high=self.high, fields=("low", "high"))

    def apply(self, region: Region, context: Context) -> Region:
        lower, upper = log_band(self.low, self.high)
        log_ratio, advantages = region.log_ratio.detach(), context.signals.advantages
        dropped = ((advantages > 0) & (log_ratio > upper)) | ((advantages < 0) & (log_ratio < lower))
        return leave_out(region, dropped, band=(lower, upper))


@part("trust", "balanced-clip")
class BalancedClip(Trust):
    """Bounds searched once per update until positive terms weigh at least `target` times the negative ones (BAPO).

    First the floor rises (dropping more negative tokens), then the cap (admitting more positive ones). A > 0 contributes
    min(w, cap) A, A < 0 contributes max(w, floor) |A|.
    """

    role: ClassVar[Literal["clip"]] = "clip"
    scope: ClassVar[Scope] = Scope.UPDATE
    searches: ClassVar[bool] = True
    in_tables: ClassVar[tuple[str, ...]] = ("cap",)
    floor: float = number(default=0.2, says="Lower bound at the start of the search.", minimum=0.0)
    floor_max: float = number(default=0.8, says="Where the floor stops rising.", minimum=0.0)
    floor_step: float = number(default=0.05, says="Step of the floor.", above=0.0)
    cap: float = number(default=1.2, says="Upper bound at the start of the search.", above=0.0)
    cap_max: float = number(default=2.0, says="Where the cap stops rising.", above=0.0)
    cap_step: float = number(default=0.1, says="Step of the cap.", above=0.0)
    target: float = number(default=0.5, says="Positive over negative contribution to reach.", above=0.0)

    def __post_init__(self) -> None:
        check_order(self, "floor", "floor_max")
        check_order(self, "cap", "cap_max")

    def apply(self, region: Region, context: Context) -> Region:
        mask, advantages = context.signals.mask, context.signals.advantages
        ratio = region.log_value.detach().exp()
        positive, negative = mask.select(advantages.clamp(min=0.0)), mask.select((-advantages).clamp(min=0.0))
        floors, caps = _steps(self.floor, self.floor_max, self.floor_step), _steps(self.cap, self.cap_max, self.cap_step)
        # Loops over some twenty candidates, not over tokens. Nothing here waits for the device.
        gains = torch.stack([(ratio.clamp(max=cap) * positive).sum() for cap in caps])
        losses = torch.stack([(ratio.clamp(min=floor) * negative).sum() for floor in floors])
        # Tried in this order: all floors beside the first cap, then the other caps beside the last floor.
        enough = torch.cat([gains[0] >= self.target * losses, gains[1:] >= self.target * losses[-1]])
        position = torch.arange(len(enough), device=enough.device)
        chosen = torch.where(enough, position, len(enough) - 1).amin().double()
        floor = (self.floor + self.floor_step * chosen.clamp(max=len(floors) - 1)).clamp(max=self.floor_max)
        cap = (self.cap + self.cap_step * (chosen - len(floors) + 1).clamp(min=0)).clamp(max=self.cap_max)
        lower, upper = (bound.to(ratio.dtype).log().reshape(1, 1) for bound in (floor, cap))
        clipped = by_sign(region.log_value, advantages, lower, upper)
        return replace(region, log_value=clipped, band=(lower, upper))


def _steps(start: float, stop: float, step: float) -> list[float]:
    """start, start + step, ... and stop, whether or not a step lands on it."""
    count = math.ceil((stop - start) / step - 1e-9)
    return [min(start + index * step, stop) for index in range(count + 1)]


def leave_out(region: Region, dropped: Tensor, band: tuple[Tensor | float, Tensor | float] | None = None) -> Region:
    """The region without the dropped tokens."""
    remaining = (~dropped).to(region.log_ratio.dtype)
    selected = remaining if region.selected is None else region.selected * remaining
    return replace(region, selected=selected, band=band or region.band)
