"""Calculated peaks are within 10 % of every peak measured on a GPU; what was not measured is said so."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import factors, peaks, plan_page
from benchmarks.gpu import plan as gpu_plan
from legato.capacity import planning
from legato.capacity.measured import Result, measured

ROWS = peaks.check_rows()


@pytest.mark.parametrize("row", [row for row in ROWS if row.training], ids=lambda row: row.what)
def test_the_calculated_peak_is_within_10_percent_of_the_measured_one(row: peaks.Row) -> None:
    assert abs(row.error) < peaks.ALLOWED, f"{row.calculated:.2f} GiB calculated, {row.measured:.2f} measured"


def test_every_kind_of_peak_is_compared() -> None:
    sources = [row.source for row in ROWS]
    assert {"gpu.json, B4", "gpu.json, B6", "gpu.json, B8", "gpu.json, B11", "large.json"} <= set(sources)
    assert sum(row.training for row in ROWS) >= 20
    # On average the estimate is neither high nor low.
    mean = sum(row.error for row in ROWS if row.training) / sum(row.training for row in ROWS)
    assert abs(mean) < 0.02


def test_the_page_says_not_measured_where_nothing_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peaks, "PLAN_RESULTS", tmp_path / "none.json")
    titles = [case.title for case in gpu_plan.SHAPES.values()]
    assert peaks.missing_shapes() == dict.fromkeys(titles, "not measured")
    monkeypatch.undo()
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    missing = peaks.missing_shapes()
    for title in titles:
        assert (f"| {title} | {missing.get(title)} |" in page) is (title in missing)


def result(**changes: Any) -> dict[str, Any]:
    size = {"parameters": 4_022_468_096, "trained": 4_022_468_096, "pack_tokens": 13_032, "cached_tokens": 70_000}
    return {
        "peak_gib": 100.0,
        "several_packs": True,
        "checkpointing": False,
        "fused": True,
        "tiny": False,
        **size,
        **changes,
    }


def test_stored_results_of_the_gpu_fill_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shapes = {"4b": result(), "8b-8bit": {"skipped": "bitsandbytes is not installed"}}
    shapes["0.6b"] = {"error": "exit code 1: OutOfMemoryError: CUDA out of memory"}
    shapes["8b-lora"] = result(parameters=8_190_735_360, trained=43_646_976, checkpointing=True)
    shapes["mixture"] = result(parameters=4_361_000_000, trained=4_361_000_000)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"machine": {}, "date": "2026-12-01", "shapes": shapes}))
    monkeypatch.setattr(peaks, "PLAN_RESULTS", file)
    rows = {row.what: row for row in peaks._planned_rows()}
    assert set(rows) == {gpu_plan.SHAPES[name].title for name in ("4b", "8b-lora", "mixture")}
    assert all(row.date == "2026-12-01" and row.source == "plan.json" for row in rows.values())
    dense = rows["Qwen3-4B, full training"]
    # 18 bytes a weight, 36 layers of activations, keys and values of 70,000 tokens, logits.
    layer = 2 * (2 * 2560 + 2 * 4096 + 2 * 1024 + 2 * 9728) + 4 * 32
    expected = 18 * 4_022_468_096 + 13_032 * 36 * layer + 70_000 * 147_456 + 5 * 2**27 * 2
    assert dense.calculated * 2**30 == pytest.approx(expected, rel=0.01)
    assert 20 < rows["Qwen3-8B, LoRA of rank 16"].calculated < 50
    missing = peaks.missing_shapes()
    assert "Qwen3-4B, full training" not in missing
    assert missing["Qwen3-8B, full training, 8-bit optimizer"] == "not measured: bitsandbytes is not installed"
    assert missing["Qwen3-0.6B, full training"] == "failed: exit code 1: OutOfMemoryError: CUDA out of memory"


def test_the_host_memory_of_an_offloaded_optimizer_has_a_row_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = 8_190_735_360
    away = result(parameters=weights, trained=weights, host_gib=90.0)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"date": "2026-12-01", "shapes": {"8b-offload": away, "4b": result(host_gib=1.0)}}))
    monkeypatch.setattr(peaks, "PLAN_RESULTS", file)
    rows = {row.what: row for row in peaks._planned_rows()}
    host = rows.pop("Qwen3-8B, full training, offloaded optimizer: host")
    assert set(rows) == {"Qwen3-8B, full training, offloaded optimizer", "Qwen3-4B, full training"}
    # Masters and two moments, and 3.7 GB of pinned memory as torch rounds it.
    assert host.measured == 90.0 and host.training
    assert host.calculated * 2**30 == pytest.approx(12 * weights + 2**32, rel=1e-6)


def test_a_peak_that_is_off_by_more_is_marked_on_the_page() -> None:
    row = peaks.Row(what="x", measured=100.0, calculated=112.0, source="plan.json", date="2026-12-01")
    assert plan_page._off_by(row) == "+12.0 %, beyond 10%"
    assert plan_page._off_by(replace(row, calculated=91.0)) == "-9.0 %"
    assert plan_page._off_by(replace(row, training=False)) == "+12.0 %"


def test_whole_steps_stand_beside_their_calculated_times() -> None:
    seconds = {"step": 12.0, "rollouts": 5.0, "anchor": 1.0, "update": 6.0}
    shapes = {"8b-lora": {"peak_gib": 44.04, "seconds": seconds, "tokens_per_second": 5461.3, "date": "2026-12-02"}}
    shapes["4b"] = {"error": "no"}
    page = plan_page.steps({"date": "2026-12-01", "shapes": shapes})
    (line,) = page.splitlines()[2:]
    cells = line.strip("| ").split(" | ")
    plan = planning.plan_setup(plan_page.planned_setup("8b-lora"))
    assert cells[0] == "Qwen3-8B, LoRA of rank 16" and cells[5:] == ["5,461", "44.0", "2026-12-02"]
    assert cells[1] == f"12.00 ({plan.times.step:.2f})" and cells[2].startswith("5.00 (")
    assert plan.setup.response_total == 16 * 8 * 512 and plan.setup.lora_rank == 16 and plan.need.checkpointing
    assert plan_page.steps({"date": "", "shapes": {}}) == "None was measured yet."


def test_stored_results_of_the_gpu_are_shown_beside_a_plan() -> None:
    timed = {"seconds": {"step": 12.3456}, "tokens_per_second": 5308.4}
    shapes = {"8b-lora": result(**timed), "mixture": result(**timed), "8b-8bit": {"skipped": "bitsandbytes"}}
    machine = {"device": "NVIDIA H200", "torch": "2.11.0"}
    rows = list(factors.planned_results({"machine": machine, "date": "2026-12-01", "shapes": shapes}))
    assert [(row["value"], row["unit"]) for row in rows] == [(100.0, "GiB"), (12.346, "s"), (5308, "tokens/s")]
    # The mixture is cut to a few layers: it is no shipped shape.
    assert {row["model"] for row in rows} == {"qwen3-8b"} and all("LoRA of rank 16" in row["load"] for row in rows)
    assert Result(**rows[0]).date == "2026-12-01"


def test_the_factors_of_the_package_are_those_of_the_results() -> None:
    stored = json.loads(factors.STORED.read_text())
    assert stored == factors.factors(), "run python -m benchmarks.gpu.factors"
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    for each in (*stored["results"], *(factor for group in stored["factors"].values() for factor in _listed(group))):
        file = each["source"].removeprefix("benchmarks/results/").partition(":")[0]
        assert (results / file).is_file() and each["machine"].startswith("NVIDIA H200") and each["date"].startswith("2026-")


def test_no_measured_share_is_more_than_all_of_it() -> None:
    stored = json.loads(factors.STORED.read_text())["factors"]
    for name in ("training_efficiency", "scoring_efficiency", "mixture_efficiency", "adapters", "decode_efficiency"):
        assert all(0 < each["value"] <= 1 for each in _listed(stored[name])), name


def test_both_decoding_times_follow_from_the_factors_that_are_solved_from_them() -> None:
    def decode(floor: float, steps: int, share: float, each: float) -> dict[str, Any]:
        return {"floor_seconds": floor, "steps": steps, "seconds": floor / share + steps * 28 * each}

    share, each = factors._solve_decoding(decode(1.2, 512, 0.8, 7e-5), decode(1.3, 1024, 0.8, 7e-5), 28)
    assert (share, each) == (pytest.approx(0.8), pytest.approx(7e-5))
    # Of two versions of the code, of which one is faster than the other.
    fixed, ragged = decode(1.2, 512, 0.99, 6.5e-5), decode(1.2, 1024, 0.99, 7e-5)
    fixed["run"], ragged["run"] = "2026-11-18 18:28", "2026-11-16 02:16"
    with pytest.raises(ValueError, match=r"got 112% of the roofline .*measure both again"):
        factors._solve_decoding(fixed, ragged, 28)


def test_decoding_is_solved_from_runs_of_one_day_and_one_version() -> None:
    """Projections were joined between the stored runs of 2026-11-16 and of 2026-11-18."""

    def section(now: tuple[str, str], *before: str) -> dict[str, Any]:
        runs = [dict(zip(factors.DECODED, [{"run": each} for each in times], strict=False)) for times in (now, before)]
        return {"parts": runs[0], "earlier": runs[1]}

    def chosen(stored: dict[str, Any]) -> list[str]:
        return [run["run"] for run in factors.decoding_runs(stored)]

    old, ragged, new = "2026-11-15 13:17", "2026-11-16 02:16", "2026-11-18 18:28"
    assert chosen(section((new, ragged), old)) == [old, ragged]
    assert chosen(section((new, new), old, ragged)) == [new, new]
    with pytest.raises(ValueError, match="expected equal and ragged lengths measured within a day, got runs of 2026-11-18"):
        factors.decoding_runs(section((new, ragged)))
    assert chosen(factors.load("gpu.json")["sections"]["B7"]) == [old, ragged], "until ragged lengths are measured anew"


def _listed(group: Any) -> list[dict[str, Any]]:
    return group if isinstance(group, list) else [group]


def test_the_ceilings_of_the_h200_are_the_measured_ones() -> None:
    from legato.capacity.hardware import find_hardware

    part = factors.load("gpu.json")["sections"]["B4"]["parts"]["1.7B Legato, one pass"]
    gpu = find_hardware("h200")
    assert gpu.matmul / 1e12 == pytest.approx(part["ceilings"]["tflops"], rel=1e-3)
    assert gpu.bandwidth / 1e12 == pytest.approx(part["ceilings"]["terabytes_per_second"], rel=1e-3)


def test_results_are_of_shipped_models() -> None:
    from legato.capacity.model import shipped_names

    assert {result.model for result in measured().results} <= set(shipped_names())
