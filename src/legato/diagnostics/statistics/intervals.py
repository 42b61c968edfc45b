"""Intervals for shares and means, in plain Python: reports and evaluations say how sure they are."""

import math
from collections.abc import Sequence

_Z = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion. It stays within [0, 1] and is not empty at the ends."""
    if trials <= 0:
        return 0.0, 1.0
    share, square = successes / trials, _Z * _Z
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = _Z / (1 + square / trials) * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over problems. Samples of one problem are not independent; problems are."""
    count = len(means)
    if count < 2:
        return 0.0, 1.0
    mean = math.fsum(means) / count
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in means) / (count - 1) / count)
    return max(0.0, mean - _Z * error), min(1.0, mean + _Z * error)
