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

import torch
from torch import Tensor

from legato.errors import InputError

ERROR_RATE = 0.05
"""The chance, over all comparisons of a study, of an interval that misses the truth."""
WANTED_POWER = 0.8

Verdict = Literal["difference", "equivalent", "undecided"]

_POINTS = 20_000
"""Of the integration over the chi distribution. At 1 degree of freedom t quantiles up to 250 are then exact to 4 digits."""


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


def power(difference: float, spread: float, seeds: int, comparisons: int) -> float:
    """The chance of the verdict "difference" where the true difference and the spread between seeds are these."""
    shift = difference / spread * math.sqrt(seeds)
    return exceedance(critical_t(ERROR_RATE / comparisons, seeds - 1), seeds - 1, shift)


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
    """P(|T| > t) of Student's t; with a `shift` of the noncentral one, (Z + shift) / sqrt(chi^2 / freedom).

    The normal probability is integrated over the density of u = sqrt(chi^2 / freedom) by Simpson's rule.
    """
    points, weighted_density = _chi_grid(freedom)
    beyond = torch.erfc((t * points - shift) / math.sqrt(2)) + torch.erfc((t * points + shift) / math.sqrt(2))
    return float((weighted_density * beyond).sum()) / 2


@cache
def _chi_grid(freedom: int) -> tuple[Tensor, Tensor]:
    """Values of u, and the density of u times the weights of Simpson's rule."""
    # Nearly all mass of u lies within 9 standard deviations of 1, which are 1 / sqrt(2 freedom) each.
    points = torch.linspace(0, 1 + 9 / math.sqrt(2 * freedom), _POINTS + 1, dtype=torch.float64)
    weights = torch.full_like(points, 2.0)
    weights[1::2], weights[0], weights[-1] = 4.0, 1.0, 1.0
    constant = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    density = torch.exp(constant + torch.xlogy(torch.tensor(freedom - 1.0), points) - freedom * points.square() / 2)
    return points, density * weights * points[1] / 3
