"""A world of two gloo processes gives the counts, sums, tables and choices of one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import legato
from legato.core.world import OneProcess, World
from legato.diagnostics.metrics.measure import measure
from tests.training.two_ranks import MEMBERS, numbers, signals

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.two_ranks", str(rank), str(folder)], env=environment, cwd=ROOT
        )
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    read: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return read


@pytest.mark.parametrize("name", MEMBERS)
def test_two_processes_count_and_measure_as_one(found: dict[str, Any], name: str) -> None:
    algorithm = legato.algorithm(name)
    whole = slice(0, 8)
    counts = OneProcess().sum_counts(algorithm.count(signals(whole), 4))
    assert found[name]["tokens"] == counts.all.tokens.item()
    expected = measure(signals(whole), numbers(algorithm, counts, whole)).report()
    expected.pop("ratio/sequence_max", None)
    measured = {key: value for key, value in found[name]["metrics"].items() if key in expected}
    assert measured == pytest.approx(expected, rel=1e-12, abs=1e-15, nan_ok=True)
    assert "ratio/sequence_max" in found[name]["metrics"], "a key that one rank lacks is taken from the other"


def test_a_table_filled_by_rows_is_summed_exactly(found: dict[str, Any]) -> None:
    expected = torch.cat([torch.arange(12.0).reshape(4, 3) / 7 + rank for rank in range(2)])
    assert torch.equal(torch.tensor(found["table"]), expected)


def test_values_are_gathered_in_order_and_the_largest_choice_is_everybodys(found: dict[str, Any]) -> None:
    assert found["gathered"] == [{"rank": 0, "words": ""}, {"rank": 1, "words": "ü"}]
    assert found["agreed"] == 7


def test_one_process_is_a_world() -> None:
    world = OneProcess()
    assert isinstance(world, World) and world.agree(3) == 3 and world.gather("x") == ["x"]
