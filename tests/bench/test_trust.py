"""A small part of the hostile trial: a few cases of every part that takes no process of its own, and the page."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.trust import page, rewards
from benchmarks.trust.__main__ import PARTS, run_part
from benchmarks.trust.page import trust_page
from benchmarks.trust.soak import Reading, growth
from benchmarks.trust.trial import KINDS, Case
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
    "killed-for-memory": 0,
    "killed-ranks": 0,
    "rewards": 1,
    "full-disk": 1,
    "damaged-records": 1,
    "soak": 0,
}
"""How many cases of each part run here. Kills, signals, ranks, places and soaks have tests of their own."""


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


def test_a_soak_sees_what_grows() -> None:
    def readings(**last: int) -> list[Reading]:
        steady = Reading(10, 1.0, 2**28, 8, 3)
        return [steady, steady, steady, replace(steady, step=40, **last)]

    assert growth(readings(resident_bytes=2**28 + 2**24, open_files=9)) is None
    assert growth(readings(resident_bytes=2**28 + 2**26)) == "memory grew by 64 MiB in 30 steps"
    assert growth(readings(open_files=40)) == "open files grew from 8 to 40"
    assert growth(readings(threads=9)) == "threads grew from 3 to 9"
    assert growth(readings()[:3]) is not None


def test_every_reward_of_the_trial_is_tried() -> None:
    cases = rewards.hostile_rewards(random.Random(1))
    count = len(rewards.REWARDS) + len(rewards.FILES) + 1
    assert len({next(cases).name for _ in range(count)}) == count
    assert rewards._hung_import in [case.check for case in islice(rewards.hostile_rewards(random.Random(1)), count)]


def test_kills_go_through_all_kinds_in_turn() -> None:
    for part in ("kills", "torn-saves", "killed-for-memory"):
        names = [case.name for case in islice(PARTS[part](random.Random(1)), len(KINDS))]
        assert {name.partition(", killed")[0] for name in names} == {*KINDS}


def test_counts_of_cases_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(source: random.Random) -> Iterator[Case]:
        yield Case(name="one", check=lambda folder: None, counts={"plain": 2})
        yield Case(name="two", check=lambda folder: None, counts={"plain": 1, "LoRA": 1}, measured={"steps": 3})

    monkeypatch.setitem(PARTS, "kills", part)
    result = run_part("kills", seed=1, seconds=60)
    assert result["counts"] == {"plain": 3, "LoRA": 1} and result["measured"] == [{"case": "two", "steps": 3}]


def test_the_page_lists_every_part() -> None:
    text = trust_page()
    assert all(f"| {part} |" in text for part in PARTS)


def test_the_page_says_where_a_commit_landed_that_the_history_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"held": 3, "broken": [], "date": "2026-11-16", "commit": "0000000", "seed": 1}
    results = {"kills": {**result, "part_of": "1111111"}, "signals": result}
    (tmp_path / "trust.json").write_text(json.dumps(results))
    monkeypatch.setattr(page, "RESULTS", tmp_path / "trust.json")
    lines = [line for line in trust_page().splitlines() if "0000000" in line]
    assert ["(part of 1111111)" in line for line in lines] == [True, False]
