"""Statistics over seeds against slow, direct implementations."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.diagnostics.collapse import collapse
from legato.diagnostics.statistics.intervals import wilson_interval
from legato.diagnostics.statistics.seeds import (
    DRAWS,
    difference,
    interquartile_mean,
    interval,
    mean,
    probability_of_improvement,
    resamples,
)
from tests.proof.pages import numbers

scores = st.lists(st.integers(0, 20).map(lambda n: n / 20), min_size=1, max_size=9)


def middle_half(values: list[float]) -> float:
    """The integral of the quantile function from 1/4 to 3/4, in exact fractions."""
    total, count = Fraction(0), len(values)
    for place, value in enumerate(sorted(values)):
        low, high = max(Fraction(place, count), Fraction(1, 4)), min(Fraction(place + 1, count), Fraction(3, 4))
        total += Fraction(value) * max(Fraction(0), high - low)
    return float(2 * total)


@given(scores)
def test_the_interquartile_mean_is_the_middle_half_of_the_quantile_function(values: list[float]) -> None:
    assert interquartile_mean(values) == pytest.approx(middle_half(values), abs=1e-12)


def test_the_interquartile_mean_leaves_out_a_seed_that_collapsed() -> None:
    assert interquartile_mean([0.8, 0.8, 0.0, 0.8]) == 0.8
    assert interquartile_mean([0.3]) == pytest.approx(0.3)
    assert interquartile_mean([0.0, 0.6, 0.9]) == pytest.approx((0.5 * 0.0 + 2 * 0.6 + 0.5 * 0.9) / 3)


@given(scores, scores)
def test_the_probability_of_improvement_is_counted_over_all_pairs(values: list[float], others: list[float]) -> None:
    counted = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(values, others)]
    assert probability_of_improvement(values, others) == pytest.approx(sum(counted) / len(counted))
    assert probability_of_improvement(values, others) + probability_of_improvement(others, values) == pytest.approx(1.0)


def slow_interval(statistic: object, samples: list[list[float]]) -> tuple[float, float]:
    """The 95 % bootstrap interval over all n^n draws of seeds, enumerated by counting in base n."""
    count, statistics = len(samples[0]), []
    for number in range(count**count):
        draw = [number // count**place % count for place in range(count)]
        statistics.append(statistic(*[[sample[seed] for seed in draw] for sample in samples]))  # type: ignore[operator]
    few = Fraction(25, 1000) * len(statistics)
    low = min(end for end in statistics if sum(each <= end for each in statistics) > few)
    high = max(end for end in statistics if sum(each >= end for each in statistics) > few)
    return low, high


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_an_interval_of_one_arm_is_over_all_draws_of_its_seeds(count: int, statistic: object) -> None:
    values = [random.Random(count).random() for _ in range(count)]
    assert interval(statistic, values) == pytest.approx(slow_interval(statistic, [values]), abs=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("statistic", [difference, probability_of_improvement])
def test_an_interval_of_two_arms_draws_the_same_seeds_from_both(statistic: object) -> None:
    generator = random.Random(1)
    one = [generator.random() for _ in range(4)]
    other = [value - 0.1 * generator.random() for value in one]
    result = interval(statistic, one, other)  # type: ignore[arg-type]
    assert result == pytest.approx(slow_interval(statistic, [one, other]), abs=1e-12)


def test_an_effect_of_the_seed_on_both_arms_cancels() -> None:
    """Scores vary much between seeds, but arms always differ by 0.1: unpaired draws would give an interval around 0."""
    one, other = [0.1, 0.4, 0.7, 0.9], [0.0, 0.3, 0.6, 0.8]
    assert interval(difference, one, other) == pytest.approx((0.1, 0.1))
    low, high = interval(mean, one) or (0, 0)
    assert high - low > 0.4


def test_resampling_many_seeds_is_deterministic() -> None:
    values = [random.Random(seed).random() for seed in range(12)]
    draws = resamples(12)
    assert len(draws) == DRAWS and all(len(draw) == 12 and set(draw) <= set(range(12)) for draw in draws)
    random.seed(5)
    first = interval(mean, values)
    random.seed(6)
    assert first == interval(mean, values)
    error = math.sqrt(sum((v - mean(values)) ** 2 for v in values)) / 12
    assert first == pytest.approx((mean(values) - 1.96 * error, mean(values) + 1.96 * error), abs=0.15 * error)


def test_one_seed_has_no_interval_and_unlike_samples_are_refused() -> None:
    assert interval(mean, [0.5]) is None
    assert interval(difference, [0.5], [0.4]) is None
    with pytest.raises(ValueError, match=r"\b2\b.*\b3\b"):
        interval(difference, [1.0, 2.0], [1.0, 2.0, 3.0])


# Collapse


def make_course(*right: int, problems: int = 128) -> list[tuple[float, float, float]]:
    return [(each / problems, *wilson_interval(each, problems)) for each in right]


@pytest.mark.parametrize(
    ("right", "shares"),
    [
        ((40, 80, 0), [0.0, 62.5]),
        ((40, 80, 30), [23.4, 62.5]),
        ((60, 64, 35), [27.3, 46.9]),
        ((80, 20), [15.6, 62.5]),
        ((40, 0, 0, 0), [0.0, 31.2]),
        ((40, 80, 60), None),
        ((40, 80, 41), None),
        ((40, 38), None),
        ((0, 3, 0), None),
        ((0, 0), None),
        ((40,), None),
        ((), None),
    ],
)
def test_a_collapse_is_a_fall_that_chance_does_not_explain(right: tuple[int, ...], shares: list[float] | None) -> None:
    """`shares` in percent: the accuracy at the end, then the best or first accuracy it fell from."""
    message = collapse(make_course(*right))
    assert (message if message is None else numbers(message)) == shares


def test_a_fall_over_few_problems_is_no_collapse() -> None:
    assert collapse(make_course(3, 1, problems=4)) is None
    assert collapse(make_course(96, 32, problems=128)) is not None
