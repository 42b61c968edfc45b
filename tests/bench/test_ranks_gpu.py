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
    assert side["seconds"] > 0 and len(side["samples"]) == 1 and min(side["gradient_norms"]) > 0


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    result = ranks.run_part("two", 240.0, options(tmp_path))
    assert "exit" not in result and not list(ranks._errors(result)), result
    collectives = ("sum_table", "reduce_scatter", "all_gather", "all_gather_16_bits", "broadcast")
    assert all(result["collectives"][name] for name in collectives)
    for way in ranks.WAYS:
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
    both = {"one": {"seconds": 4.0}, "optimizer": {"seconds": 4.2}, "layers, kept": {"seconds": 4.41}}
    assert ranks.summarise({"torchrun 1.7B": {"sides": both}}) == pytest.approx(
        {
            "optimizer over one process, 1.7B": 1.05,
            "layers, kept over one process, 1.7B": 1.1025,
            "layers, kept over optimizer, 1.7B": 1.05,
        }
    )
    parts["plain 0.6B again"] = {"sides": {"plain": {"seconds": 2.04}}}
    assert ranks.summarise(parts)["plain again over plain, 0.6B"] == pytest.approx(1.02)
    assert ranks.summarise(parts)["torchrun over plain, 0.6B"] == pytest.approx(1.0), "over the mean of both plain runs"


def test_a_part_that_fails_keeps_the_stored_one_and_the_others_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    outcomes: dict[str, Any] = {"nccl": {"takes_two": False}, "two": {"exit": 1}}
    monkeypatch.setattr(ranks, "run_part", lambda part, limit, own: outcomes[part])
    ranks.run_all(options(tmp_path, "two", "nccl"))
    stored = ranks.load_results(tmp_path / "ranks.json")
    when = {"date": stored["date"], "commit": "abc1234"}
    assert stored["parts"] == {name: {**result, **when} for name, result in outcomes.items()}
    outcomes["nccl"] = {"exit": "more than 40 s"}
    ranks.run_all(options(tmp_path, "nccl"))
    assert ranks.load_results(tmp_path / "ranks.json")["parts"]["nccl"] == {"takes_two": False, **when}
    ranks.run_all(options(tmp_path, "nccl", seconds=1.0))
    assert ranks.load_results(tmp_path / "ranks.json")["parts"]["nccl"] == {"takes_two": False, **when}


def test_every_stored_part_names_its_own_date_and_commit() -> None:
    """Parts are measured on different days, and one command measures only some of them."""
    parts = ranks.load_results(ranks.RESULTS)["parts"]
    assert all(part["date"] and part["commit"] for part in parts.values())


def test_the_time_of_all_parts_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    # A command on the GPU's machine has ten minutes, and a part that is ended gets 15 s to do so.
    assert ranks.SECONDS + 15 < 590
    assert ranks.PARTS["plain 0.6B"][0] == 0 and ranks.PARTS["two"][0] == 2
    limits: list[float] = []
    monkeypatch.setattr(ranks, "run_part", lambda part, limit, own: limits.append(limit) or {"exit": 1})
    ranks.run_all(options(tmp_path, "torchrun 0.6B", "two", seconds=50.0))
    assert len(limits) == 2 and max(limits) <= 50.0, "a part may not run longer than what is left of the command"
    ranks.run_all(options(tmp_path, "two", seconds=ranks.SECONDS))
    assert limits[-1] == ranks.PARTS["two"][1]


def test_the_page_tells_what_was_measured_and_what_was_not() -> None:
    from benchmarks.gpu.plan_page import one_gpu

    nothing = one_gpu({"parts": {}, "date": "", "machine": {}})
    assert nothing.count("not measured yet") == 13
    two = {"float32, layers, kept": {"weights": 2e-7}, "float32, optimizer": {"error": "RuntimeError: no"}, "exit": 1}
    two["engine, layers, kept"] = {"equal_on_ranks": True}
    ratios = {"layers, kept over one process, 0.6B": 1.034, "torchrun over plain, 0.6B": 1.026}
    stored = {
        "parts": {
            "nccl": {"takes_two": False, "date": "2026-11-19", "commit": "abc1234"},
            "two": two,
            "torchrun 0.6B": {},
            "torchrun 1.7B": {"errors": {"layers, kept": "OutOfMemoryError: full"}},
        },
        "ratios": ratios,
        "date": "2026-11-20",
        "machine": {"device": "H200"},
    }
    lines = one_gpu(stored).splitlines()
    told = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert "| at most +2 % | +2.6 %, more than wanted | 2026-11-20, H200 |" in lines[3]
    assert "| at most +5 % | +3.4 % |" in lines[4]
    kept = "FSDP2 on one rank, 1.7B, layers and gradients kept during updates, over the same run without"
    assert "failed: OutOfMemoryError: full" in told[kept]
    assert "refuses them | 2026-11-19, H200, abc1234 |" in told["NCCL with two processes on one GPU"]
    failed = "failed: exit code 1"
    assert [line.split(" | ")[2] for line in lines[9:]] == [
        *("failed: RuntimeError: no", failed),
        *("2.0e-07", "equal"),
        *(failed, failed),
    ]
