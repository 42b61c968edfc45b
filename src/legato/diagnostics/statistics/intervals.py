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


def clustered_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of one value per problem; Wilson's where every value is 0 or 1.

    The normal interval is empty if all values are equal, and a set that was answered wrong throughout is no proof of 0.
    """
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(math.fsum(values), len(values))
    return _interval_of_equal(values, 0.0, 1.0) or mean_interval(values)


def _interval_of_equal(values: Sequence[float], least: float, most: float) -> tuple[float, float] | None:
    """Return the interval of a mean where all values are equal; None where they are not.

    By Wilson, a share of up to `others` of all problems may have another value, anywhere between `least` and `most`.
    """
    if max(values) - min(values) > 1e-9:
        return None
    others = wilson_interval(0, len(values))[1]
    usual = (1 - others) * values[0]
    return usual + others * least, usual + others * most


def difference_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of `after - before` over the same problems, and its 95 % interval (paired, by problem)."""
    changes = [new - old for old, new in zip(before, after, strict=True)]
    mean = math.fsum(changes) / len(changes)
    if len(changes) < 2:
        return mean, -1.0, 1.0
    equal = _interval_of_equal(changes, -1.0, 1.0)
    if equal is not None:
        return mean, *equal
    half = _Z * math.sqrt(math.fsum((x - mean) ** 2 for x in changes) / (len(changes) - 1) / len(changes))
    return mean, max(-1.0, mean - half), min(1.0, mean + half)


def mean_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over problems. Samples of one problem are not independent; problems are."""
    count = len(means)
    if count < 2:
        return 0.0, 1.0
    mean = math.fsum(means) / count
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in means) / (count - 1) / count)
    return max(0.0, mean - _Z * error), min(1.0, mean + _Z * error)
