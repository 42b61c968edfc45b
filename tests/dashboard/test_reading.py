"""How the dashboard reads files that grow: lines once, and curves of a bounded number of points."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest

from legato.dashboard.runs import parse_metrics
from legato.dashboard.series import BUCKETS, Series
from legato.records.tail import Tail, spread_lines


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.lines() == (False, [])
    path.write_bytes(b"one\ntw")
    assert tail.lines() == (False, [b"one"])
    assert tail.lines() == (False, [])
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.lines() == (False, [b"two", b"three"])


def test_lines_are_read_in_portions(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    expected = [b"%d" % number * 50 for number in range(40)]
    path.write_bytes(b"\n".join(expected) + b"\n")
    tail, lines_read = Tail(path), []
    while lines := tail.lines(64)[1]:
        assert sum(map(len, lines)) < 400
        lines_read += lines
    assert lines_read == expected


@pytest.mark.parametrize("grown", [False, True], ids=["shorter", "longer than before"])
def test_a_file_that_was_cut_back_is_read_again(tmp_path: Path, grown: bool) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree\n")
    tail = Tail(path)
    tail.lines()
    path.write_bytes(b"one\nzwei\n" + b"drei und mehr\n" * grown)
    again, lines = tail.lines()
    assert again and lines[:2] == [b"one", b"zwei"]


def test_an_overview_takes_lines_from_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%d %s\n" % (number, b"x" * (number % 97)) for number in range(5000)))
    line_numbers = [int(line.split()[0]) for line in spread_lines(path, 50)]
    assert line_numbers == sorted(set(line_numbers)) and line_numbers[0] == 0 and line_numbers[-1] == 4999
    assert len(line_numbers) >= 50 and max(later - sooner for sooner, later in pairwise(line_numbers)) < 250


# Curves


@pytest.mark.parametrize("portion", [1, 7, 1000])
@pytest.mark.parametrize("count", [1, 5, BUCKETS, BUCKETS + 1, 3001])
def test_a_curve_keeps_means_and_extremes(count: int, portion: int) -> None:
    chance = random.Random(count)
    values = [None if chance.random() < 0.1 else chance.gauss(0, 1) for _ in range(count)]
    records = [{"kind": "step", "step": number + 1, "a/b": value} for number, value in enumerate(values)]
    series = Series()
    for start in range(0, count, portion):
        series.add(records[start : start + portion])
    assert series.records == count
    curve = series.curve("a/b")
    width = series.width
    assert width == max(1, 2 ** math.ceil(math.log2(count / BUCKETS)))
    buckets = [(at + 1, [v for v in values[at : at + width] if v is not None]) for at in range(0, count, width)]
    buckets = [(at, inside) for at, inside in buckets if inside]
    if not buckets:
        assert curve is None
        return
    assert curve is not None
    assert curve["mean"] == pytest.approx([sum(inside) / len(inside) for _, inside in buckets], abs=1e-5)
    assert curve["low"] == pytest.approx([min(inside) for _, inside in buckets], abs=1e-5)
    assert curve["high"] == pytest.approx([max(inside) for _, inside in buckets], abs=1e-5)
    assert curve["x"][:-1] == [at for at, _ in buckets[:-1]]
    few = series.curve("a/b", 10)
    assert few is not None and len(few["x"]) <= 10
    assert min(few["low"]) == min(curve["low"]) and max(few["high"]) == max(curve["high"])


def test_values_that_are_not_numbers_are_not_drawn() -> None:
    series = Series()
    series.add([{"step": 1, "a": 1.0, "b": "x", "c": True, "d": None, "a@0": 1.0}, {"step": 2, "late": 3}, {"a": 5.0}])
    assert set(series.keys) == {"a", "late"}, "and nothing by update, which is not drawn"
    assert series.curve("late") == {"x": [2.0], "mean": [3.0], "low": [3.0], "high": [3.0], "breaks": []}
    assert series.curve("b") is None


def test_a_curve_breaks_where_steps_have_no_value() -> None:
    series = Series()
    series.add([{"step": step} if 10 < step < 31 else {"step": step, "a": 1.0} for step in range(1, 41)])
    curve, few = series.curve("a"), series.curve("a", 10)
    assert curve is not None and curve["breaks"] == [10] and curve["x"][9:11] == [10, 31]
    assert few is not None and few["x"] == [1, 5, 9, 31, 33, 40] and few["breaks"] == [3]
    series.add([{"step": step, "rare": 1.0} if step % 10 == 0 else {"step": step} for step in range(41, 380)])
    whole, ended = series.curve("rare"), series.curve("a", 10)
    assert whole is not None and whole["breaks"] == [], "a key of every tenth step has no gaps"
    assert ended is not None and ended["x"][-1] <= 40, "what ended early is not drawn to the end"


@pytest.mark.parametrize(("records", "every"), [(2000, 10), (600, 3), (1000, 5), (3000, 7)])
def test_a_key_of_every_few_steps_breaks_only_where_values_are_missing(records: int, every: int) -> None:
    """Buckets of several records have the next value one bucket sooner or later."""
    series, gap = Series(), range(records // 3, records // 2)
    steps = range(1, records + 1)
    series.add(
        [{"step": s} | ({"even": 1.0} | ({} if s in gap else {"torn": 1.0}) if s % every == 0 else {}) for s in steps]
    )
    for points in (100, 300):
        even, torn = series.curve("even", points), series.curve("torn", points)
        assert even is not None and even["breaks"] == []
        assert torn is not None and len(torn["breaks"]) == 1


def test_histograms_are_left_out_of_a_line() -> None:
    line = json.dumps(
        {"kind": "step", "step": 1, "histograms": {"x": {"edges": [0, 1], "counts": [3]}}}, separators=(",", ":")
    )
    assert parse_metrics(line.encode()) == {"kind": "step", "step": 1}
    assert parse_metrics(b'{"a":",\\"histograms\\":{","b":1}') == {"a": ',"histograms":{', "b": 1}
    assert parse_metrics(b"[1]") is None and parse_metrics(b"{") is None
