"""The adaptive clip in plain floats, one update of responses at a time, and the lagged quantile it should find.

x_i = sgn(A_i) log s_i over responses with A_i != 0; where A < 0 it is scaled by q = b_high / b_low: one b bounds all.
With lengths, z_i = x_i sqrt(L_i / reference) takes the place of x_i.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist


def signed_log_ratios(
    advantages: Sequence[float],
    log_ratios: Sequence[float],
    quotient: float = 1.0,
    lengths: Sequence[float] | None = None,
    reference: float = 1.0,
) -> list[float]:
    """x of every response with a nonzero advantage, in units of b_high."""
    values = []
    for row, (advantage, log_ratio) in enumerate(zip(advantages, log_ratios, strict=True)):
        if advantage == 0:
            continue
        scale = 1.0 if lengths is None else math.sqrt(lengths[row] / reference)
        values.append(scale * (log_ratio if advantage > 0 else -quotient * log_ratio))
    return values


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def clipped_share(x: Sequence[float], bound: float) -> float:
    return sum(value > bound for value in x) / len(x)


def by_counts(bound: float, x: Sequence[float], target: float, rate: float) -> float:
    """Robbins-Monro on log b."""
    return bound * math.exp(rate * (clipped_share(x, bound) - target))


def by_moments(bound: float, x: Sequence[float], target: float, rate: float, least: float) -> float:
    """log b moves towards the quantile of a normal law with the moments of x."""
    mean = math.fsum(x) / len(x)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in x) / len(x))
    target_bound = max(mean + NormalDist().inv_cdf(1 - target) * deviation, least)
    return math.exp((1 - rate) * math.log(bound) + rate * math.log(target_bound))


class LaggedQuantile:
    """log b <- (1 - rate) log b + rate log max(Quantile_{1-p}(x of the last updates), least)."""

    def __init__(self, bound: float, target: float, rate: float, window: int, least: float) -> None:
        self.bound, self.target, self.rate, self.window, self.least = bound, target, rate, window, least
        self.recent: list[Sequence[float]] = []

    def advance(self, x: Sequence[float]) -> None:
        self.recent = [*self.recent, x][-self.window :]
        target_bound = max(quantile([value for update in self.recent for value in update], 1 - self.target), self.least)
        self.bound = math.exp((1 - self.rate) * math.log(self.bound) + self.rate * math.log(target_bound))
