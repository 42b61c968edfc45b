"""How far a reader follows one step: calls and changes of file, counted by `benchmarks/walk.py`."""

import pytest

from benchmarks.walk import ROOT, measure_one_step


@pytest.mark.slow
def test_a_step_takes_a_third_fewer_calls_and_changes_of_file_than_before_the_rooms_were_cut_anew() -> None:
    step = measure_one_step(ROOT / "src")
    assert step["changes"] <= 3982 * 2 / 3
    assert step["calls"] <= 15662 * 2 / 3
