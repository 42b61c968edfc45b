"""The measurement of `legato plan` at toy shapes on a CPU: shapes train, results are stored singly, faults stay alone."""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import plan


def options(tmp_path: Path, *shapes: str, seconds: float = 100.0) -> argparse.Namespace:
    return argparse.Namespace(
        shapes=list(shapes),
        output=tmp_path / "plan.json",
        seconds=seconds,
        device="cpu",
        tiny=True,
        child=None,
        commit="abc1234",
    )


@pytest.mark.parametrize("name", ["8b-lora", "mixture", "8b-offload"])
def test_a_shape_trains_and_tells_what_its_peak_depends_on(name: str) -> None:
    result = plan.measure(name, device="cpu", tiny=True)
    assert result["peak_gib"] == 0.0, "a CPU counts no memory"
    assert set(result["seconds"]) == {"step", "rollouts", "anchor", "update"} and result["tokens_per_second"] > 0
    # A group of 8 responses of 8 tokens after a prompt of 6, of whose last token nothing is read.
    assert result["pack_tokens"] == 2 * (6 + 8 * 7) and result["several_packs"] is False
    assert (result["trained"] < result["parameters"]) is (name == "8b-lora")
    demand = plan.demand_of_result(name, result)
    assert demand.parameters == result["parameters"] and demand.memory(checkpointing=True).total > 0
    assert demand.adapter_rank == (16 if name == "8b-lora" else 0) and demand.offload is (name == "8b-offload")


def test_the_peak_of_host_memory_is_the_least_that_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (plan.free_host_bytes() or 0) > 2**20
    free, measured = [64 * 2**30], dict[str, Any]()
    monkeypatch.setattr(plan, "free_host_bytes", lambda: free[0])
    with plan.host_peak(measured, 100 * 2**30, every=0.001):
        for free[0] in (20 * 2**30, 70 * 2**30):
            time.sleep(0.2)
    assert measured == {"host_gib": 80.0}
    free[0], unread = 20 * 2**30, list[None]()

    def fail_once() -> int | None:
        if not unread:
            unread.append(None)
            return None
        return free[0]

    monkeypatch.setattr(plan, "free_host_bytes", fail_once)
    with plan.host_peak(measured, 100 * 2**30, every=0.001):
        time.sleep(0.1)
    assert unread and measured == {"host_gib": 80.0}, "a moment that could not be read is not one without free memory"
    unknown = dict[str, Any]()
    with plan.host_peak(unknown, None):
        pass
    assert unknown == {}


class Children:
    """Stands in for the processes of the shapes."""

    def __init__(self, outcomes: dict[str, Any]) -> None:
        self.outcomes, self.limits = outcomes, dict[str, float]()

    def __call__(self, command: list[str], *, stdout: Any, timeout: float, **rest: Any) -> subprocess.CompletedProcess[str]:
        name = command[command.index("--child") + 1]
        self.limits[name] = timeout
        outcome = self.outcomes[name]
        if outcome == "hangs":
            raise subprocess.TimeoutExpired(command, timeout)
        if isinstance(outcome, dict):
            Path(command[command.index("--output") + 1]).write_text(json.dumps(outcome))
            return subprocess.CompletedProcess(command, 0)
        stdout.write(f"Traceback\n{outcome}\n")
        return subprocess.CompletedProcess(command, 1)


def test_one_fault_does_not_end_the_others_and_old_results_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(
        {"4b": {"peak_gib": 99.0}, "8b-lora": "torch.OutOfMemoryError: CUDA out of memory", "mixture": "hangs"}
    )
    monkeypatch.setattr(plan.subprocess, "run", children)
    plan.run_all(options(tmp_path, "4b", "8b-lora", "mixture"))
    stored = plan.load_results(tmp_path / "plan.json")
    assert stored["shapes"]["4b"]["peak_gib"] == 99.0 and stored["date"] and stored["machine"]["device"] == "CPU"
    assert "exit code 1: torch.OutOfMemoryError" in stored["shapes"]["8b-lora"]["error"]
    assert "it took more than" in stored["shapes"]["mixture"]["error"]
    assert all((shape["date"], shape["commit"]) == (stored["date"], "abc1234") for shape in stored["shapes"].values())
    children.outcomes["4b"] = "broken"
    later = options(tmp_path, "4b")
    later.commit = "def5678"
    plan.run_all(later)
    kept = plan.load_results(tmp_path / "plan.json")["shapes"]["4b"]
    assert kept["peak_gib"] == 99.0 and kept["commit"] == "abc1234"


def test_every_stored_shape_names_its_own_date_and_commit() -> None:
    """Shapes are measured on different days, and one command measures only some of them."""
    shapes = plan.load_results(plan.RESULTS)["shapes"]
    assert set(shapes) == set(plan.SHAPES) and all(shape["date"] and shape["commit"] for shape in shapes.values())


def test_no_shape_starts_after_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children({"4b": {"peak_gib": 1.0}, "0.6b": {"peak_gib": 1.0}})
    monkeypatch.setattr(plan.subprocess, "run", children)
    plan.run_all(options(tmp_path, "4b", seconds=30.0))
    assert 0 < children.limits["4b"] <= 30.0
    plan.run_all(options(tmp_path, "0.6b", seconds=5.0))
    assert "time of the command is up" in plan.load_results(tmp_path / "plan.json")["shapes"]["0.6b"]["skipped"]
    assert "0.6b" not in children.limits


def test_shapes_that_this_machine_cannot_hold_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from legato.training.memory import available

    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    assert plan.why_not("8b-8bit", device="cuda") == "bitsandbytes is not installed"
    monkeypatch.setattr(available, "available", lambda device: 64 * 10**9)
    assert plan.why_not("8b-offload", device="cuda") == "the host has 64 GB, 109 GB are needed"
    monkeypatch.setattr(available, "available", lambda device: 256 * 10**9)
    assert plan.why_not("8b-offload", device="cuda") is None
    assert plan.why_not("4b", device="cuda") is None


def test_the_shapes_are_those_that_the_issue_names_and_their_time_is_bounded() -> None:
    assert {"0.6b", "1.7b", "4b", "8b-lora", "8b-offload", "mixture"} <= set(plan.SHAPES)
    assert list(plan.SHAPES)[-1] == "8b-offload", "it may take the machine along"
    # The offloaded one is named alone: 98 GB of state are made on the host and stepped there.
    assert all(case.seconds <= (300 if case.offload else 150) for case in plan.SHAPES.values())
