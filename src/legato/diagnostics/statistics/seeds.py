"""Statistics over a few seeds, of one arm and of two arms with the same seeds. Deterministic.

An interval is the middle 95 % of the statistic over resampled seeds (the percentile bootstrap). Arms are resampled
together: a draw takes the same seeds from each, so an effect of the seed on all arms cancels in their difference. With few
seeds such intervals are too narrow (docs/compare.md has the figures); with one seed there is none.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter

from legato.errors import InputError

DRAWS = 10_000
"""Number of draws if there are too many to list all."""


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


def interval(statistic: Callable[..., float], *samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of a statistic of samples that hold one value per seed, in the same order; None with one seed."""
    if len({len(sample) for sample in samples}) != 1:
        raise InputError(f"samples of {[len(sample) for sample in samples]} seeds; paired ones have the same seeds")
    if len(samples[0]) < 2:
        return None
    statistics = sorted(statistic(*(draw(sample) for sample in samples)) for draw in _drawings(len(samples[0])))
    # The ends are draws themselves, with at most 2.5 % of all draws beyond each.
    beyond = int(0.025 * len(statistics))
    return statistics[beyond], statistics[-1 - beyond]


@cache
def _drawings(count: int) -> tuple[Callable[[Sequence[float]], tuple[float, ...]], ...]:
    """Return the draws as functions of a sample: bands of curves apply them thousands of times."""
    return tuple(itemgetter(*draw) for draw in resamples(count))


@cache
def resamples(count: int) -> tuple[tuple[int, ...], ...]:
    """Return draws of `count` seeds with replacement: all of them up to five seeds, else the same 10,000 every time."""
    if count**count <= DRAWS:
        return tuple(itertools.product(range(count), repeat=count))
    generator = random.Random(0)
    return tuple(tuple(generator.randrange(count) for _ in range(count)) for _ in range(DRAWS))
