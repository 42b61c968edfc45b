"""Statistics over a few seeds, of one arm and of two arms. Intervals are those of `paired.py`."""

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return math.fsum(values) / len(values)


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of the middle half; a value on its edge counts with the share of it that lies inside."""
    # Each value four times: a quarter of these is a whole number, whatever the number of seeds.
    fourfold = sorted(value for value in values for _ in range(4))
    return mean(fourfold[len(values) : 3 * len(values)])


def probability_of_improvement(values: Sequence[float], others: Sequence[float]) -> float:
    """P(X > Y) of one run drawn from each side, over all pairs of seeds; a tie is half a win."""
    wins = sum((value > other) + 0.5 * (value == other) for value in values for other in others)
    return wins / (len(values) * len(others))


def difference(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean of `values` minus the mean of `others`."""
    return mean(values) - mean(others)
