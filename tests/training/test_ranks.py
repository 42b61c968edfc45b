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
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.two_ranks", str(rank), str(folder)], env=environment, cwd=ROOT
        )
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    contents: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return contents


@pytest.mark.parametrize("name", MEMBERS)
def test_two_processes_count_and_measure_like_one(results: dict[str, Any], name: str) -> None:
    algorithm = legato.algorithm(name)
    whole = slice(0, 8)
    counts = OneProcess().sum_counts(algorithm.count(signals(whole), 4))
    assert results[name]["tokens"] == counts.all.tokens.item()
    expected = measure(signals(whole), numbers(algorithm, counts, whole)).report()
    expected.pop("ratio/sequence_max", None)
    measured = {key: value for key, value in results[name]["metrics"].items() if key in expected}
    assert measured == pytest.approx(expected, rel=1e-12, abs=1e-15, nan_ok=True)
    assert "ratio/sequence_max" in results[name]["metrics"], "a key that one rank lacks is taken from the other"


def test_a_table_filled_by_rows_is_summed_exactly(results: dict[str, Any]) -> None:
    expected = torch.cat([torch.arange(12.0).reshape(4, 3) / 7 + rank for rank in range(2)])
    assert torch.equal(torch.tensor(results["table"]), expected)


def test_gather_keeps_the_order_of_ranks_and_agree_takes_the_largest_choice(results: dict[str, Any]) -> None:
    assert results["gathered"] == [{"rank": 0, "words": ""}, {"rank": 1, "words": "ü"}]
    assert results["agreed"] == 7


def test_one_process_is_a_world() -> None:
    world = OneProcess()
    assert isinstance(world, World) and world.agree(3) == 3 and world.gather("x") == ["x"]
