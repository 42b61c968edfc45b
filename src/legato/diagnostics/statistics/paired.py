"""Paired comparisons over few seeds: Student's t intervals, their correction for several comparisons, verdicts and power.

The difference of a comparison is computed seed by seed, so what a seed does to all arms cancels. Its interval is that of
Student's t. With m comparisons in one study each interval has the level 1 - 0.05 / m (Bonferroni): the chance that any of
them misses the truth is at most 5 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from legato.errors import InputError

ERROR_RATE = 0.05
"""The chance, over all comparisons of a study, of an interval that misses the truth."""
WANTED_POWER = 0.8

Verdict = Literal["difference", "equivalent", "undecided"]

_POINTS = 4_000
"""Of the integration over the chi distribution, for the noncentral t."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The differences of one comparison over seeds."""

    differences: tuple[float, ...]
    mean: float
    low: float
    high: float
    """The ends of the corrected interval."""
    spread: float
    """The standard deviation between seeds, or the floor where that is larger."""
    verdict: Verdict


def compare_pairs(differences: Sequence[float], *, comparisons: int, margin: float, floor: float = 0.0) -> Paired:
    """The corrected interval of the mean difference, and the verdict.

    `margin`: differences smaller than this do not matter. An interval inside (-margin, margin) is "equivalent". One that
    excludes 0 is a "difference", even where it lies within the margin.
    `floor`: the least standard deviation to assume. A measurement on a grid, or a share of few answers, can agree on all
    seeds by its coarseness alone.
    """
    count = len(differences)
    if count < 2:
        raise InputError(f"expected at least 2 seeds for a paired comparison, got {count}")
    mean = math.fsum(differences) / count
    spread = max(floor, math.sqrt(math.fsum((value - mean) ** 2 for value in differences) / (count - 1)))
    half = critical_t(ERROR_RATE / comparisons, count - 1) * spread / math.sqrt(count)
    low, high = mean - half, mean + half
    verdict: Verdict = "undecided"
    if low > 0 or high < 0:
        verdict = "difference"
    elif -margin < low and high < margin:
        verdict = "equivalent"
    return Paired(differences=tuple(differences), mean=mean, low=low, high=high, spread=spread, verdict=verdict)


def mean_interval(values: Sequence[float], comparisons: int = 1, floor: float = 0.0) -> tuple[float, float] | None:
    """Student's t interval of a mean, at the level 1 - 0.05 / comparisons; None with one value.

    `floor`: the least standard deviation to assume, as in `compare_pairs`.
    """
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    spread = max(floor, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1)))
    half = critical_t(ERROR_RATE / comparisons, count - 1) * spread / math.sqrt(count)
    return mean - half, mean + half


def share_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval of a mean of shares, which lies between 0 and 1."""
    interval = mean_interval(values)
    return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))


def power(difference: float, spread: float, seeds: int, comparisons: int) -> float:
    """The chance of the verdict "difference" where the true difference and the spread between seeds are these."""
    shift = difference / spread * math.sqrt(seeds)
    return exceedance(critical_t(ERROR_RATE / comparisons, seeds - 1), seeds - 1, shift)


def equivalence_power(margin: float, spread: float, seeds: int, comparisons: int) -> float:
    """The chance of the verdict "equivalent" where there is no difference and the spread between seeds is this one."""
    error = spread / math.sqrt(seeds)
    half = critical_t(ERROR_RATE / comparisons, seeds - 1) * error  # of the interval, where the spread is met exactly

    def inside(scale: float) -> float:
        farthest = min(half * scale, margin - half * scale)  # for the mean: the interval includes 0 and stays in the margin
        return math.erf(farthest / error / math.sqrt(2)) if farthest > 0 else 0.0

    return math.fsum(density * inside(point) for point, density in _chi_grid(seeds - 1))


def seeds_needed(difference: float, spread: float, comparisons: int, wanted: float = WANTED_POWER) -> int:
    """The fewest seeds with the wanted power; at most 1000."""
    return next((seeds for seeds in range(2, 1000) if power(difference, spread, seeds, comparisons) >= wanted), 1000)


@cache
def critical_t(error_rate: float, freedom: int) -> float:
    """The t with P(|T| > t) = error_rate, for so many degrees of freedom."""
    low, high = 0.0, 1.0
    while exceedance(high, freedom) > error_rate:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exceedance(middle, freedom) > error_rate else (low, middle)
    return (low + high) / 2


def exceedance(t: float, freedom: int, shift: float = 0.0) -> float:
    """P(|T| > t) of Student's t; with a `shift` of the noncentral one, (Z + shift) / sqrt(chi^2 / freedom)."""
    if shift == 0:
        return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    root = math.sqrt(2)
    return (
        math.fsum(
            density * (math.erfc((t * point - shift) / root) + math.erfc((t * point + shift) / root))
            for point, density in _chi_grid(freedom)
        )
        / 2
    )


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - _incomplete_beta(1 - x, b, a)
    tiny = 1e-300
    value, upper, lower = 1.0, 1.0, 0.0
    for place in range(400):
        half = place // 2
        if place == 0:
            term = 1.0
        elif place % 2 == 0:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        else:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        lower = 1 / (1 + term * lower or tiny)
        upper = 1 + term / upper or tiny
        value *= upper * lower
        if abs(1 - upper * lower) < 1e-15:
            break
    front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(front) / a * (value - 1)


@cache
def _chi_grid(freedom: int) -> tuple[tuple[float, float], ...]:
    """Values of u = sqrt(chi^2 / freedom), and the density of u times the weights of Simpson's rule."""
    # Nearly all mass of u lies within 9 standard deviations of 1, which are 1 / sqrt(2 freedom) each.
    width = (1 + 9 / math.sqrt(2 * freedom)) / _POINTS
    constant = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    grid = []
    for place in range(_POINTS + 1):
        point = place * width
        weight = 1.0 if place in (0, _POINTS) else 4.0 if place % 2 else 2.0
        density = point ** (freedom - 1) * math.exp(constant - freedom * point * point / 2)
        grid.append((point, density * weight * width / 3))
    return tuple(grid)
