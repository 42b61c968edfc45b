"""A clip whose band adapts to the ratios of past updates.

For a ratio (of a response, a turn or a token) with A != 0, x = sgn(A) log r is clipped beyond b_high (A > 0) or b_low
(A < 0). The band of an update comes from the updates before it, never from its own ratios: a quantile of its own ratios
would clip the same share even if all drift were noise. The first update on some rollouts has r = 1 and does not count.

    counts       log b <- log b + rate (f - target), f the share clipped           (Robbins-Monro; finds the quantile)
    perplexity   log b <- (1 - rate) log b + rate log b*,  b* = mean x + z sd x    (z the normal quantile of 1 - target)

log s of a response is log PPL_old - log PPL_new, so mean and sd of x are those of the change in log-perplexity. Both rules
read sums that add over packs and ranks. The sums stay on the device: no update waits for them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from legato.core.parts import choice, integer, number, part
from legato.core.shapes import Spread
from legato.core.sums import Deviation, Mean, Piece, Sums
from legato.errors import InputError
from legato.objectives.clips import by_sign
from legato.objectives.slots import Bounds, Context, PartState, Region, Trust

_SCALE = "'none': one band for all; 'sqrt-length': b sqrt(reference_length / L), wider for shorter segments."
_FOLLOWS = "'counts': the share clipped; 'perplexity': mean and deviation of the change of log-perplexity."
_SIDES = "'together': one rule moves both and their ratio stays that of the start; 'apart': each follows its own sign of A."
_NOISE = "b stays above this many noise floors (the deviation of log r with nothing trained, from a run's probe)."
_FREEZE = "The band stops moving after this many updates with advantages; 0: never."


@part("trust", "auto-clip")
class AutoClip(Trust):
    """min(r A, clamp(r, 1 - low, 1 + high) A) with a band that moves until the share `target` of ratios is clipped.

    low and high are where it starts. Its state is passed to `loss` and stepped by `algorithm.advance`.
    """

    role: ClassVar[Literal["clip"]] = "clip"
    adapts: ClassVar[bool] = True
    in_tables: ClassVar[tuple[str, ...]] = ("low", "high")
    low: float = number(default=3e-4, says="First distance of the lower bound from 1.", above=0.0, below=1.0)
    high: float = number(default=4e-4, says="First distance of the upper bound from 1.", above=0.0)
    target: float = number(default=0.15, says="Share of ratios with A != 0 to clip.", above=0.0, below=0.5)
    rate: float = number(default=0.1, says="How fast log b moves.", above=0.0, maximum=1.0)
    follows: str = choice("counts", "perplexity", default="counts", says=_FOLLOWS)
    sides: str = choice("together", "apart", default="together", says=_SIDES)
    scale: str = choice("none", "sqrt-length", default="none", says=_SCALE)
    reference_length: float = number(default=2048.0, says="Length at which b holds under 'sqrt-length'.", above=0.0)
    noise_multiple: float = number(default=3.0, says=_NOISE, minimum=0.0)
    floor: float = number(default=1e-6, says="Smallest b, whatever the noise: float32 resolves no less.", above=0.0)
    ceiling: float = number(default=0.05, says="Largest b.", above=0.0)
    freeze_after: int = integer(default=0, says=_FREEZE, minimum=0)

    def __post_init__(self) -> None:
        widest, narrowest = max(self._start), min(self._start)
        if not self.floor <= narrowest <= widest <= self.ceiling:
            raise InputError(
                f"trust 'auto-clip': low = {self.low:g} and high = {self.high:g} are not between floor = {self.floor:g}"
                f" and ceiling = {self.ceiling:g}"
            )

    @property
    def _start(self) -> tuple[float, float]:
        """b_low and b_high before the first update."""
        return -math.log1p(-self.low), math.log1p(self.high)

    def initial(self) -> PartState:
        low, high = self._start
        return {"log_low": low, "log_high": high, "noise": 0.0, "updates": 0.0}

    def bounds(self, state: PartState | None) -> Bounds:
        """The bounds in the state. They cannot be tightened: the band would move back to its target."""
        now = self.initial() if state is None else state
        return Bounds(low=float(now["log_low"]), high=float(now["log_high"]), logarithmic=True)

    def apply(self, region: Region, context: Context) -> Region:
        state, widening = context.state[self.name], self._widening(context)
        lower, upper = (
            (sign * _number(state[side], region.log_ratio.device)).to(region.log_ratio.dtype).reshape(1, 1) * widening
            for side, sign in (("log_low", -1), ("log_high", 1))
        )
        clipped = by_sign(region.log_value, context.signals.advantages, lower, upper)
        return replace(region, log_value=clipped, band=(lower, upper), adapts=True)

    def compared(self, log_ratio: Spread, context: Context) -> Spread:
        """The quantity that b bounds: the log-ratio, times sqrt(L / reference_length) if the band depends on the length."""
        return log_ratio / self._widening(context)

    def _widening(self, context: Context) -> Spread | float:
        if self.scale == "none":
            return 1.0
        return (self.reference_length / context.segments.size().clamp(min=1)).sqrt()

    def advance(self, state: PartState, sums: Sums, first: bool) -> PartState:
        """The band of the next update. The sums of a first update are ignored."""
        if first:
            return state
        beyond, reach = (self._pieces(sums, f"clip/{name}") for name in ("beyond", "reach"))
        device = next(iter(beyond.values())).total.device  # type: ignore[attr-defined]
        now = {name: _number(value, device) for name, value in state.items()}
        free = torch.ones_like(now["updates"]) if not self.freeze_after else (now["updates"] < self.freeze_after).double()
        moves = {}
        for side, signs in self._signs().items():
            if self.follows == "counts":
                move = self._by_counts([beyond[sign] for sign in signs])
            else:
                move = self._by_moments([reach[sign] for sign in signs], now, side)
            # If nothing was counted, or a ratio is not finite, the band stays.
            moves[side] = torch.where(torch.isfinite(move), move, 0.0) * free
        moved = {side: now[side] * moves[side].exp() for side in moves}
        # An update counts if any row has an advantage, so skipping silent rows changes nothing.
        counts = (_sum_field(list(beyond.values()), Mean, "count") > 0).double()
        return {**self._clamp_band({**now, **moved}), "updates": now["updates"] + counts}

    def calibrated(self, state: PartState, noise: float) -> PartState:
        """The state with a noise floor, and a band that respects it."""
        numbers = {**{name: float(value) for name, value in state.items()}, "noise": float(noise)}
        clamped = self._clamp_band({name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()})
        return {name: float(value) for name, value in clamped.items()}

    def _pieces(self, sums: Sums, key: str) -> dict[str, Piece]:
        missing = [word for word in (f"{key}_positive", f"{key}_negative") if word not in sums]
        if missing:
            raise InputError(
                f"trust 'auto-clip' follows {missing[0]}, which the sums given do not hold; they are those of a loss of this"
                " algorithm with metrics=True"
            )
        return {word: sums[f"{key}_{word}"] for word in ("positive", "negative")}

    def _signs(self) -> dict[str, tuple[str, ...]]:
        """The signs of A whose ratios move each bound."""
        if self.sides == "apart":
            return {"log_low": ("negative",), "log_high": ("positive",)}
        return dict.fromkeys(("log_low", "log_high"), ("positive", "negative"))

    def _by_counts(self, pieces: list[Piece]) -> Tensor:
        total, count = _sum_field(pieces, Mean, "total"), _sum_field(pieces, Mean, "count")
        return self.rate * (total / count - self.target)

    def _by_moments(self, pieces: list[Piece], now: Mapping[str, Tensor], side: str) -> Tensor:
        """The move of log b. `pieces` are moments of x / b, so b* / b is their mean plus z deviations."""
        count = _sum_field(pieces, Deviation, "count")
        mean = _sum_field(pieces, Deviation, "total") / count
        variance = _sum_field(pieces, Deviation, "squares") / count - mean.square()
        wanted = mean + NormalDist().inv_cdf(1 - self.target) * variance.clamp(min=0.0).sqrt()
        # If the ratios move far against the advantages, b* is negative: the floor is the narrowest band.
        return self.rate * torch.maximum(wanted, self._least(now) / now[side]).log()

    def _least(self, now: Mapping[str, Tensor]) -> Tensor:
        return (self.noise_multiple * now["noise"]).clamp(min=self.floor)

    def _clamp_band(self, now: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The band between floor and ceiling. With sides = 'together' the quotient of the bounds stays the same."""
        least, most = self._least(now), self.ceiling
        if self.sides == "apart":
            sides = {side: now[side].maximum(least).clamp(max=most) for side in ("log_low", "log_high")}
        else:
            low, high = self._start
            quotient = high / low
            upper = now["log_high"].maximum(least * max(1.0, quotient)).clamp(max=most * min(1.0, quotient))
            sides = {"log_low": upper / quotient, "log_high": upper}
        return {**now, **sides}


def _number(value: Tensor | float, device: torch.device) -> Tensor:
    """A number of the state as float64 on the device; the host does not wait."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)


def _sum_field(pieces: list[Piece], kind: type[Piece], field: str) -> Tensor:
    assert all(isinstance(piece, kind) for piece in pieces)
    total: Tensor = torch.stack([getattr(piece, field) for piece in pieces]).sum()
    return total
