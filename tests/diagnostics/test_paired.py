"""Paired comparisons: t quantiles against tables, and 2,000 simulated studies for false differences and power."""

import math
import random
from collections.abc import Callable

import pytest

from legato.diagnostics.statistics.paired import (
    compare_pairs,
    critical_t,
    equivalence_power,
    exceedance,
    power,
    seeds_needed,
)
from legato.errors import InputError

STUDIES = 2000


@pytest.mark.parametrize(
    ("error_rate", "freedom", "expected"),
    [
        (0.05, 1, 12.7062),
        (0.05, 2, 4.30265),
        (0.05, 5, 2.57058),
        (0.01, 7, 3.49948),
        (0.05, 30, 2.04227),
        (0.002, 10, 4.14370),
    ],
)
def test_critical_values_are_those_of_the_tables(error_rate: float, freedom: int, expected: float) -> None:
    assert critical_t(error_rate, freedom) == pytest.approx(expected, rel=2e-5)
    assert exceedance(expected, freedom) == pytest.approx(error_rate, rel=1e-4)


def simulate(
    draw: Callable[[random.Random], float], *, seeds: int, comparisons: int, margin: float = 0.5, floor: float = 0.0
) -> dict[str, int]:
    """How many of 2,000 studies gave each verdict at least once, over their comparisons."""
    generator = random.Random(7)
    counts = {"difference": 0, "equivalent": 0, "undecided": 0}
    for _ in range(STUDIES):
        verdicts = {
            compare_pairs(
                [draw(generator) for _ in range(seeds)], comparisons=comparisons, margin=margin, floor=floor
            ).verdict
            for _ in range(comparisons)
        }
        for verdict in verdicts:
            counts[verdict] += 1
    return counts


# Where the true rate is 5 %, more than 6.3 % of 2,000 studies are false in 1 of 200 cases: the simulation error allowed.
FALSE = math.ceil(STUDIES * (0.05 + 2.6 * math.sqrt(0.05 * 0.95 / STUDIES)))


@pytest.mark.parametrize("comparisons", [1, 4])
@pytest.mark.parametrize(
    ("name", "draw", "floor"),
    [
        ("normal", lambda generator: generator.gauss(0, 0.7), 0.0),
        ("frontiers on a grid of doublings", lambda generator: round(generator.gauss(0, 0.7)), math.sqrt(2 / 12)),
        (
            "accuracies of runs that collapse or do not",
            lambda generator: 0.4 * (generator.random() < 0.3) - 0.4 * (generator.random() < 0.3) + generator.gauss(0, 0.02),
            0.02,
        ),
    ],
)
def test_equal_arms_differ_in_at_most_5_percent_of_studies(
    name: str, draw: Callable[[random.Random], float], floor: float, comparisons: int
) -> None:
    counts = simulate(draw, seeds=8, comparisons=comparisons, floor=floor)
    assert counts["difference"] <= FALSE, (name, counts)


@pytest.mark.parametrize(("difference", "spread", "comparisons"), [(1.0, 0.6, 1), (1.0, 0.6, 4), (0.1, 0.12, 3)])
def test_the_stated_power_is_the_share_of_studies_that_find_the_difference(
    difference: float, spread: float, comparisons: int
) -> None:
    seeds = seeds_needed(difference, spread, comparisons)
    stated = power(difference, spread, seeds, comparisons)
    assert stated >= 0.8 > power(difference, spread, seeds - 1, comparisons)
    generator = random.Random(3)
    hits = sum(
        compare_pairs(
            [generator.gauss(difference, spread) for _ in range(seeds)], comparisons=comparisons, margin=difference
        ).verdict
        == "difference"
        for _ in range(STUDIES)
    )
    error = math.sqrt(stated * (1 - stated) / STUDIES)
    assert hits / STUDIES == pytest.approx(stated, abs=3.3 * error)


@pytest.mark.parametrize(("margin", "seeds", "comparisons"), [(0.15, 10, 1), (0.15, 6, 3), (0.5, 4, 1)])
def test_the_stated_chance_of_equivalence_is_the_share_of_studies_that_find_it(
    margin: float, seeds: int, comparisons: int
) -> None:
    """Studies of arms that do not differ, with few seeds and with enough, and with a margin so wide that only a difference
    that is none can spoil the verdict."""
    stated = equivalence_power(margin, 0.13, seeds, comparisons)
    generator = random.Random(4)
    hits = sum(
        compare_pairs([generator.gauss(0, 0.13) for _ in range(seeds)], comparisons=comparisons, margin=margin).verdict
        == "equivalent"
        for _ in range(STUDIES)
    )
    error = math.sqrt(stated * (1 - stated) / STUDIES)
    assert 0 < stated < 1 and hits / STUDIES == pytest.approx(stated, abs=3.3 * error)


def test_different_arms_are_called_equivalent_in_at_most_5_percent_of_studies() -> None:
    counts = simulate(lambda generator: generator.gauss(0.5, 0.3), seeds=8, comparisons=1, margin=0.5)
    assert counts["equivalent"] <= FALSE


def test_an_interval_inside_the_margin_is_equivalent_and_a_wide_one_undecided() -> None:
    near = compare_pairs([0.01, -0.01, 0.02, -0.02, 0.0], comparisons=1, margin=0.1)
    assert near.verdict == "equivalent" and -0.1 < near.low < 0 < near.high < 0.1
    assert compare_pairs([0.3, -0.3, 0.2, -0.2, 0.0], comparisons=1, margin=0.1).verdict == "undecided"
    assert compare_pairs([1.0, 1.1, 0.9], comparisons=1, margin=0.1).verdict == "difference"


def test_seeds_that_agree_by_the_coarseness_of_the_measure_prove_nothing() -> None:
    without, coarse = (compare_pairs([1.0] * 3, comparisons=4, margin=0.5, floor=floor) for floor in (0.0, 0.4))
    assert without.verdict == "difference" and coarse.verdict == "undecided"


def test_one_seed_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2 seeds"):
        compare_pairs([0.1], comparisons=1, margin=0.1)
