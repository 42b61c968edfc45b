"""The page of credit by turn, rendered from a comparison and a run that were written by hand."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import credit
from legato.compare.processes import Machine
from legato.compare.results import collect
from tests.proof.comparisons import OPTIONS, definition, prepare_comparison, write_run

ARMS = {"gspo": {"algorithm": "gspo"}, "gspo-token": {"algorithm": "gspo-token"}}


def test_the_page_shows_what_is_stored_and_says_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = definition(arms=ARMS, seeds=(0, 1), options=OPTIONS)
    store, jobs = prepare_comparison(tmp_path, comparison)
    for job in jobs.values():
        write_run(store, job, [32, 64, 96])
    results = collect(comparison, list(jobs.values()), store, Machine(), [])
    (store.path / "compare.json").write_text(json.dumps(results))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("[training]\nseed = 0\n[task]\nheld_out = 64\n")
    evaluations = [
        {"kind": "evaluation", "step": step, "eval/accuracy_sampled": step / 4, "eval/accuracy_greedy": 0.5}
        for step in (0, 2)
    ]
    steps = [{"kind": "step", "step": step, "time/step_seconds": 1.5} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*evaluations, *steps]))
    output = tmp_path / "credit.json"
    common = ["--machine", "a machine", "--output", str(output)]
    for words in (["comparison", str(store.path), "--bed", "guess"], ["run", str(run), "--environment", "maze"]):
        monkeypatch.setattr(sys, "argv", ["credit", *words, *common])
        credit.main()
    page = credit.experiment_page(json.loads(output.read_text()))
    assert "- gspo-token and gspo cannot be told apart" in page and page.count("Not measured yet.") == 2
    assert "| 2 | 75.0% (75.0% to 75.0%) | 75.0% (75.0% to 75.0%) |" in page
    assert "| `maze` | 0.0% to 50.0% | 50.0% to 50.0% | 2 | 3 s | 64 |" in page and "| `guess` | not measured yet |" in page


def test_the_page_counts_on_which_seeds_an_arm_arrived_first() -> None:
    by_arm = {"reward": {0: 180, 1: None, 2: 60, 3: None}, "teacher": {0: 100, 1: 160, 2: 80, 3: None}}
    (sentence,) = credit._who_arrived_first(by_arm, "0.003")
    assert "teacher was at 90 % sooner than reward on 2 of 4 seeds and later on 1;" in sentence
