"""A small part of the hostile trial: a few cases of every part that takes no process of its own, and the page."""

import random

import pytest

from benchmarks.trust.__main__ import PARTS, run_part
from benchmarks.trust.page import trust_page
from legato.core.generators import seed_generators

CASES = {
    "crash-states": 20,
    "bad-options": 12,
    "bad-data": 6,
    "model-folders": 3,
    "dashboard": 30,
    "unwritable-places": 4,
    "damaged-checkpoints": 1,
    "torn-saves": 1,
    "signals": 0,
    "kills": 0,
    "rewards": 1,
    "full-disk": 1,
    "damaged-records": 1,
    "soak": 0,
}
"""How many cases of each part run here. Kills, signals, places and soaks have tests of their own."""


def test_every_part_is_considered() -> None:
    assert {*CASES} == {*PARTS}


@pytest.mark.parametrize("part", [name for name, count in CASES.items() if count])
def test_the_promise_holds_for_a_few_cases(part: str) -> None:
    seed_generators(0)
    result = run_part(part, seed=2, seconds=120.0, most=CASES[part])
    assert result["broken"] == [] and result["held"] == CASES[part]


@pytest.mark.parametrize("part", PARTS)
def test_a_seed_draws_the_same_cases_again(part: str) -> None:
    one, other = (PARTS[part](random.Random(5)) for _ in range(2))
    assert [next(one).name for _ in range(3)] == [next(other).name for _ in range(3)]


def test_the_page_lists_every_part() -> None:
    page = trust_page()
    assert all(f"| {part} |" in page for part in PARTS)
