"""Runs made by an earlier version still resume, export, evaluate and open in the dashboard.

`tests/golden/old-runs/f0b7567.tar.xz` holds three runs of two steps made at commit f0b7567; the JSON beside it
has the metrics of steps 3 and 4 as that commit continued them.
"""

import json
import tarfile
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from legato.dashboard.board import curves
from legato.dashboard.runs import Folder
from legato.pages.report import write_report
from legato.records.directory import RunDirectory
from legato.run.doctor import examine
from legato.run.evaluate import evaluate
from legato.run.export import export
from legato.run.target import find
from legato.run.train import resume
from tests.proof.runs import Listener

GOLDEN = Path(__file__).parents[1] / "golden" / "old-runs"
REWARD = "def early(rollout):\n    return float((rollout.tokens < 40).float().mean())\n"


@pytest.fixture
def old_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(GOLDEN / "f0b7567.tar.xz") as archive:
        archive.extractall(tmp_path / "runs", filter="data")
    (tmp_path / "early.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["gspo", "kl", "moe"])
def test_a_run_of_an_earlier_version_resumes_as_it_did_then(old_runs: Path, name: str) -> None:
    listener = Listener()
    resume(old_runs / name, ["training.steps=4"], watcher=listener)
    assert "could not be checked" in listener.said and "config.toml" in listener.said
    assert ("reference/" in listener.said) == (name == "kl")
    lines = RunDirectory.open(old_runs / name).metrics()
    last = [[line for line in lines if line["kind"] == kind][-1] for kind in ("step", "evaluation")]
    expected = json.loads((GOLDEN / "f0b7567.json").read_text())[name]
    continued = {key: value for line in last for key, value in line.items() if key in expected}
    # Another machine rounds otherwise; a changed meaning is far larger.
    assert continued == pytest.approx(expected, rel=1e-2, abs=1e-3)


def test_a_run_of_an_earlier_version_exports_evaluates_and_opens(old_runs: Path) -> None:
    target = find(str(old_runs / "gspo"))
    export(target, old_runs / "exported")
    assert AutoModelForCausalLM.from_pretrained(old_runs / "exported").num_parameters() > 0
    assert evaluate(target, samples=2).problems == 4
    assert write_report(RunDirectory.open(old_runs / "gspo")).is_file()
    shown = curves(Folder(old_runs), ["gspo", "kl", "moe"], ["reward/mean"], 100, False)
    assert {curve["run"] for curve in shown["curves"]} == {"gspo", "kl", "moe"}
    assert examine(old_runs / "gspo").steps == 2
