"""The measurement of ranks on one GPU, at toy shapes on a CPU: ratios, results stored singly, faults that stay alone."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import ranks


def options(tmp_path: Path, *parts: str, seconds: float = 100.0) -> argparse.Namespace:
    return argparse.Namespace(
        parts=list(parts),
        output=tmp_path / "ranks.json",
        seconds=seconds,
        device="cpu",
        tiny=True,
        child=None,
        commit="abc1234",
    )


def test_one_process_is_timed_without_torchrun() -> None:
    side = ranks.measure("plain 0.6B", device="cpu", tiny=True)["sides"]["plain"]
    assert side["seconds"] > 0 and len(side["samples"]) == 1 and side["gradient_norm"] > 0


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    result = ranks.run_part("two", 240.0, options(tmp_path))
    assert "exit" not in result and not list(ranks._errors(result)), result
    assert all(result["collectives"][name] for name in ("sum_table", "reduce_scatter", "all_gather", "broadcast"))
    for way in ("optimizer", "layers"):
        update = result[f"float32, {way}"]
        assert update["weights"] < 1e-6 and update["gradient_norm"] == pytest.approx(update["of_one_process"], rel=1e-4)
        assert result[f"engine, {way}"]["equal_on_ranks"]


def test_a_ratio_is_over_the_run_that_was_measured_beside_it() -> None:
    parts = {
        "plain 0.6B": {"sides": {"plain": {"seconds": 2.0}}},
        "torchrun 0.6B": {"sides": {"one": {"seconds": 2.02}, "layers": {"seconds": 2.121}, "optimizer": {"error": "no"}}},
        "torchrun 1.7B": {"sides": {"one": {"seconds": 4.0}, "layers": {"seconds": 4.4}}},
    }
    assert ranks.summarise(parts) == pytest.approx(
        {
            "torchrun over plain, 0.6B": 1.01,
            "layers over one process, 0.6B": 1.05,
            "layers over one process, 1.7B": 1.1,
        }
    )
    assert ranks.summarise({}) == {}


def test_a_part_that_fails_keeps_the_stored_one_and_the_others_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    outcomes: dict[str, Any] = {"nccl": {"takes_two": False}, "two": {"exit": 1}}
    monkeypatch.setattr(ranks, "run_part", lambda part, limit, own: outcomes[part])
    ranks.run_all(options(tmp_path, "two", "nccl"))
    stored = ranks.load_results(tmp_path / "ranks.json")
    assert stored["parts"] == outcomes and stored["date"] and stored["commit"] == "abc1234"
    outcomes["nccl"] = {"exit": "more than 40 s"}
    ranks.run_all(options(tmp_path, "nccl"))
    assert ranks.load_results(tmp_path / "ranks.json")["parts"]["nccl"] == {"takes_two": False}
    ranks.run_all(options(tmp_path, "nccl", seconds=1.0))
    assert ranks.load_results(tmp_path / "ranks.json")["parts"]["nccl"] == {"takes_two": False}


def test_the_time_of_all_parts_is_bounded() -> None:
    assert sum(seconds for _, seconds in ranks.PARTS.values()) < 480
    assert ranks.PARTS["plain 0.6B"][0] == 0 and ranks.PARTS["two"][0] == 2


def test_the_page_tells_what_was_measured_and_what_was_not() -> None:
    from benchmarks.gpu.plan_page import one_gpu

    nothing = one_gpu({"parts": {}, "date": "", "machine": {}})
    assert nothing.count("not measured yet") == 6
    two = {"float32, layers": {"weights": 2e-7}, "float32, optimizer": {"error": "no"}}
    ratios = {"layers over one process, 0.6B": 1.034}
    stored = {
        "parts": {"nccl": {"takes_two": False}, "two": two},
        "ratios": ratios,
        "date": "2026-11-20",
        "machine": {"device": "H200"},
    }
    told = one_gpu(stored)
    assert "+3.4 %" in told and "refuses them" in told and "2.0e-07" in told and told.count("not measured yet") == 3
