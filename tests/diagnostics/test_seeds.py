"""Statistics over seeds against slow, direct implementations."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.diagnostics.collapse import collapse
from legato.diagnostics.statistics.intervals import wilson_interval
from legato.diagnostics.statistics.seeds import interquartile_mean, probability_of_improvement
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
