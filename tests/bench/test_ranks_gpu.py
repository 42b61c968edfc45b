"""The measurement of ranks on one GPU, at toy shapes on a CPU: ratios, results stored singly, faults that stay alone."""

import argparse
import math
import statistics
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
        ways=list(ranks.WAYS),
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


def side(*samples: float, norms: tuple[float, ...] = (2.0, 3.0)) -> dict[str, Any]:
    return {"samples": list(samples), "seconds": statistics.median(samples), "gradient_norms": list(norms)}


def ratios(parts: dict[str, Any]) -> dict[str, float]:
    return {each.name: each.ratio for each in ranks.compare({"parts": parts})}


def test_a_ratio_is_over_the_run_that_was_measured_beside_it() -> None:
    parts: dict[str, Any] = {
        "plain 0.6B": {"sides": {"plain": side(2.0)}},
        "torchrun 0.6B": {"sides": {"one": side(2.02), "layers": side(2.121), "optimizer": {"error": "no"}}},
        "torchrun 1.7B": {"sides": {"one": side(4.0), "layers": side(4.4)}},
        "two": {"backend": "gloo"},
    }
    assert ratios(parts) == pytest.approx(
        {
            "torchrun over plain, 0.6B": 1.01,
            "layers over one process, 0.6B": 1.05,
            "layers over one process, 1.7B": 1.1,
        }
    )
    assert ratios({}) == {}
    both = {"one": side(4.0), "optimizer": side(4.2), "layers, kept": side(4.41)}
    assert ratios({"torchrun 1.7B": {"sides": both}}) == pytest.approx(
        {
            "optimizer over one process, 1.7B": 1.05,
            "layers, kept over one process, 1.7B": 1.1025,
            "layers, kept over optimizer, 1.7B": 1.05,
        }
    )
    parts["plain 0.6B again"] = {"sides": {"plain": side(2.04)}}
    assert ratios(parts)["plain again over plain, 0.6B"] == pytest.approx(1.02)
    assert ratios(parts)["torchrun over plain, 0.6B"] == pytest.approx(1.0), "over the mean of both plain runs"


def test_only_results_of_one_command_are_compared_the_replaced_ones_too() -> None:
    """Machines differ by more than torchrun adds."""
    first, second = {"date": "2026-11-18", "commit": "abc"}, {"date": "2026-11-18", "commit": "def", "run": "later"}
    stored: dict[str, Any] = {
        "parts": {
            "plain 0.6B": {"sides": {"plain": side(2.0)}, **first},
            "torchrun 0.6B": {"sides": {"one": side(3.0), "layers": side(3.3)}, **second},
        },
        "earlier": [{"part": "torchrun 0.6B", "sides": {"one": side(2.02), "layers": side(2.5)}, **first}],
    }
    assert [(each.name, round(each.ratio, 2), each.commit) for each in ranks.compare(stored)] == [
        ("layers over one process, 0.6B", 1.1, "def"),
        ("torchrun over plain, 0.6B", 1.01, "abc"),
        ("layers over one process, 0.6B", 1.24, "abc"),
    ]


def test_a_comparison_tells_the_interval_of_its_median_step_and_how_far_norms_are_apart() -> None:
    parts = {"torchrun 1.7B": {"sides": {"one": side(2.0, 4.0, 2.0), "layers": side(2.2, 2.0, 2.6, norms=(2.0, 3.3))}}}
    (turns,) = ranks.compare({"parts": parts})
    assert (turns.ratio, turns.low, turns.high, turns.norms_apart) == pytest.approx((1.1, 0.5, 1.3, 0.1))
    assert turns.steps == 3
    parts = {"plain 0.6B": {"sides": {"plain": side(2.0, 4.0)}}, "torchrun 0.6B": {"sides": {"one": side(3.0, 5.0, 9.0)}}}
    (apart,) = ranks.compare({"parts": parts})
    assert (apart.ratio, apart.low, apart.high, apart.norms_apart) == (1.375, 1.25, 1.5, 0.0), "step by step"


def test_one_slow_step_does_not_move_a_comparison() -> None:
    slow = side(3.3, *[1.0] * 11)
    (told,) = ranks.compare({"parts": {"torchrun 0.6B": {"sides": {"one": slow, "layers": side(*[1.01] * 12)}}}})
    assert (told.ratio, told.low, told.high) == (1.01, 1.01, 1.01)


@pytest.mark.parametrize("count", [1, 3, 5, 6, 9, 12, 25])
def test_the_interval_of_a_median_holds_at_its_level(count: int) -> None:
    """By the binomial distribution, which the interval inverts: narrower ones would miss the median too often."""
    low, high = ranks.median_interval(range(count))
    assert low + high == count - 1, "as many values are left out below as above"

    def level(left_out: int) -> float:
        return 1 - 2 * sum(math.comb(count, heads) for heads in range(left_out + 1)) / 2**count

    assert low == 0 if count < 6 else level(int(low)) >= 0.95
    assert count < 6 or level(int(low) + 1) < 0.95


def test_a_result_that_is_replaced_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    results = [{"sides": {"plain": side(2.0)}}, {"exit": 1, "sides": {}}, {"sides": {"plain": side(3.0)}}]
    monkeypatch.setattr(ranks, "run_part", lambda part, limit, own: results.pop(0))
    for _ in range(3):
        ranks.run_all(options(tmp_path, "plain 0.6B"))
    stored = ranks.load_results(tmp_path / "ranks.json")
    assert stored["parts"]["plain 0.6B"]["sides"]["plain"]["seconds"] == 3.0
    assert [(each["part"], each["sides"]["plain"]["seconds"]) for each in stored["earlier"]] == [("plain 0.6B", 2.0)]


def test_a_part_that_fails_keeps_the_stored_one_and_the_others_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    outcomes: dict[str, Any] = {"nccl": {"takes_two": False}, "two": {"exit": 1}}
    monkeypatch.setattr(ranks, "run_part", lambda part, limit, own: outcomes[part])
    ranks.run_all(options(tmp_path, "two", "nccl"))
    stored = ranks.load_results(tmp_path / "ranks.json")
    when = {"date": stored["date"], "commit": "abc1234", "run": stored["parts"]["two"]["run"]}
    assert stored["parts"] == {name: {**result, **when} for name, result in outcomes.items()}
    outcomes["nccl"] = {"exit": "more than 40 s"}
    ranks.run_all(options(tmp_path, "nccl"))
    assert ranks.load_results(tmp_path / "ranks.json")["parts"]["nccl"] == {"takes_two": False, **when}
    ranks.run_all(options(tmp_path, "nccl", seconds=1.0))
    assert ranks.load_results(tmp_path / "ranks.json")["parts"]["nccl"] == {"takes_two": False, **when}


def test_every_stored_part_names_its_own_date_and_commit() -> None:
    """Parts are measured on different days, and one command measures only some of them."""
    stored = ranks.load_results(ranks.RESULTS)
    assert set(stored["parts"]) <= set(ranks.PARTS) and {each["part"] for each in stored["earlier"]} <= set(ranks.PARTS)
    assert all(part["date"] and part["commit"] for part in [*stored["parts"].values(), *stored["earlier"]])


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
    other = side(2.121768, norms=(2.2, 3.0))
    stored = {
        "parts": {
            "nccl": {"takes_two": False, "date": "2026-11-19", "commit": "abc1234"},
            "two": two,
            "plain 0.6B": {"sides": {"plain": side(2.0)}, "date": "2026-11-20"},
            "torchrun 0.6B": {"sides": {"one": side(2.052), "layers, kept": other}, "date": "2026-11-20"},
            "torchrun 1.7B": {"errors": {"layers, kept": "OutOfMemoryError: full"}},
        },
        "date": "2026-11-20",
        "machine": {"device": "H200"},
    }
    lines = one_gpu(stored).splitlines()
    told = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert "| within 2 % | +2.6 %, slower than that | +2.6 to +2.6 % (1 steps) | equal | 2026-11-20, H200 |" in lines[3]
    assert "| within 5 % | +3.4 % | +3.4 to +3.4 % (1 steps) | up to 10 % apart | 2026-11-20, H200 |" in lines[4]
    kept = "FSDP2 on one rank, 1.7B, layers and gradients kept during updates, over the same run without"
    assert "failed: OutOfMemoryError: full" in told[kept]
    assert "refuses them |  |  | 2026-11-19, H200, abc1234 |" in told["NCCL with two processes on one GPU"]
    failed = "failed: exit code 1"
    assert [line.split(" | ")[2] for line in lines[9:]] == [
        *("failed: RuntimeError: no", failed),
        *("2.0e-07", "equal"),
        *(failed, failed),
    ]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.01, 1.03, ""),
        (0.96, 1.04, ""),
        (1.04, 1.07, ", not resolved"),
        (0.93, 0.96, ", not resolved"),
        (0.86, 1.04, ", not resolved"),
        (0.90, 1.10, ", not resolved"),
        (1.46, 1.66, ", slower than that"),
        (0.50, 0.70, ", faster than that"),
    ],
)
def test_only_intervals_on_one_side_of_what_is_wanted_resolve_it(low: float, high: float, verdict: str) -> None:
    from benchmarks.gpu.plan_page import _verdict

    comparison = ranks.Comparison(
        name="", ratio=1.0, low=low, high=high, steps=12, norms_apart=0.0, date="2026-11-20", commit="abc1234"
    )
    assert _verdict(comparison, 0.05) == verdict
    assert not _verdict(comparison, float("inf"))
