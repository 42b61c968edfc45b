"""The page of the mixture-of-experts experiments, rendered from a comparison with hand-written runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import moe
from legato.compare.processes import Machine
from legato.compare.results import collect
from tests.proof.comparisons import OPTIONS, definition, prepare_comparison, write_run

ARMS = {"grpo": {"algorithm": "grpo"}, "grpo+R2": {"algorithm": "grpo", "training.routing_replay": "R2"}}


def test_the_page_shows_flips_and_accuracies_of_a_stored_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = definition(arms=ARMS, seeds=(0, 1), options={**OPTIONS, "policy.model": "tiny-moe"})
    store, jobs = prepare_comparison(tmp_path, comparison)
    for name, job in jobs.items():
        flips = 0.02 if name.startswith("grpo+R2") else 0.04
        measured = {"router/flip_mean": flips, "router/flip_mean@2": 0.01, "router/flip_mean@11": 0.125}
        measured |= {f"router/flip_layer{layer}": 0.1 * layer for layer in range(11)}
        write_run(store, job, [32, 64, 96], measured=measured)
    results = collect(comparison, list(jobs.values()), store, Machine(), [])
    (store.path / "compare.json").write_text(json.dumps(results))
    output = tmp_path / "moe.json"
    command = ["moe", str(store.path), "--bed", "tiny", "--machine", "a machine", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    moe.main()
    stored = json.loads(output.read_text())
    page, pictures = moe.experiment_page(stored), moe.figures(stored)
    assert "on a machine. `grpo`: algorithm = grpo; `grpo+R2`: algorithm = grpo, training.routing_replay = R2." in page
    assert "| grpo | 4.0% | 12.5% | - |" in page and "| grpo+R2 | 2.0% | 12.5% | - |" in page
    for name, path in {
        "learning": "docs/figures/moe-tiny-learning.svg",
        "by depth": "docs/figures/moe-tiny-depth.svg",
    }.items():
        assert f"![{name}](..{path.removeprefix('docs')})" in page and ">grpo+R2<" in pictures[path]
    assert moe._by_depth("grpo", stored["tiny"]["runs"]) == {layer: pytest.approx(0.1 * layer) for layer in range(11)}
    assert "| 2 | 75.0% (75.0% to 75.0%) | 75.0% (75.0% to 75.0%) |" in page
    assert "- grpo+R2 and grpo cannot be told apart" in page and "75.0 % (75.0 to 75.0)" in page
    assert page.count("Not measured yet.") == len(moe.BEDS) - 1


def test_bands_of_accuracies_stay_between_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Student's t of two seeds reaches far beyond both ends, and a band would be drawn over the axis."""
    drawn: list[Any] = []
    monkeypatch.setattr("legato.pages.drawing.draw_svg", lambda drawing: drawn.append(drawing) or "")
    moe.figures(moe.load_results())
    courses = [each for each in drawn if each.title == "Learning"]
    assert len(courses) == 3 and all("95 % intervals" in each.layout["xaxis"]["title"]["text"] for each in courses)
    values = [value for each in courses for trace in each.data for value in trace["y"]]
    assert min(values) == 0.0 and max(values) == 1.0


def test_without_results_the_page_still_documents_the_test_bed() -> None:
    page = moe.experiment_page({})
    assert "recipes/compare/moe.toml" in page and page.count("Not measured yet.") == len(moe.BEDS)
