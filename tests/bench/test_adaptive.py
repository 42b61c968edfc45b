"""The page of the adaptive-clip experiments, rendered from a comparison with hand-written runs."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import adaptive
from legato.compare.processes import Machine
from legato.compare.results import collect
from tests.proof.comparisons import OPTIONS, definition, prepare_comparison, write_run

ARMS = {"gspo": {"algorithm": "gspo"}, "gspo-auto": {"algorithm": "gspo-auto"}}


def test_the_page_shows_bands_and_accuracies_of_a_stored_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = definition(arms=ARMS, seeds=(0, 1), options=OPTIONS)
    store, jobs = prepare_comparison(tmp_path, comparison)
    for name, job in jobs.items():
        band = {"clip/band_high": 3e-3 if name.startswith("gspo-auto") else 4e-4, "ratio/sequence_std": 2e-3}
        write_run(store, job, [32, 64, 96], measured={**band, "clip/sequences@0": 0.0, "clip/sequences@1": 0.25})
    results = collect(comparison, list(jobs.values()), store, Machine(), [])
    (store.path / "compare.json").write_text(json.dumps(results))
    output = tmp_path / "adaptive.json"
    command = ["adaptive", str(store.path), "--bed", "mixed", "--machine", "a machine", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    adaptive.main()
    page = adaptive.experiment_page(json.loads(output.read_text()))
    assert "| gspo | 4.0e-04 | 4.0e-04 | 4.0e-04 | 4.0e-04 | 25.0% | 25.0% | 2.0e-03 |" in page
    assert "| gspo-auto | 3.0e-03 |" in page
    assert "| 2 | 75.0% (75.0% to 75.0%) | 75.0% (75.0% to 75.0%) |" in page
    assert "- gspo-auto and gspo cannot be told apart" in page and page.count("Not measured yet.") == 3
