"""A run made of the user's files goes on, is exported and is evaluated from any directory."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from legato.config.absolute import absolute_paths
from legato.config.load import load
from legato.records.directory import RunDirectory
from legato.run.evaluate import evaluate
from legato.run.export import export
from legato.run.target import find
from legato.run.train import resume, train
from tests.proof.runs import SMALL, cut_run, differences, outcome, records

CLIP = """
from legato.objectives.clips import Clip
class MyClip(Clip):
    pass
"""
REWARD = "def early(rollout):\n    return float((rollout.tokens < 40).float().mean())\n"
TASK = """
import json
from legato import Problem

class Mine:
    def __init__(self, source):
        self.source = source

    def load(self):
        with open(self.source) as file:
            return [Problem(prompt=line["prompt"], answer=line["answer"]) for line in map(json.loads, file)]
"""

pytestmark = pytest.mark.usefixtures("lightly")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with files of a user."""
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "clip.py").write_text(CLIP)
    (folder / "mine.py").write_text(TASK)
    (folder / "package/__init__.py").write_text("")
    (folder / "package/rewards.py").write_text(REWARD)
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(folder)
    return folder


def test_a_run_of_own_files_goes_on_elsewhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "task.kind": "mine.py:Mine",
        "task.source": "data.jsonl",
        "reward.kind": "package.rewards:early",
        "algorithm.objective.trust": ["clip.py:MyClip"],
        "training.steps": 2,
        "output.directory": "runs",
    }
    small = {option: value for option, value in {**SMALL, **options}.items() if option != "task.left_digits"}
    whole = train(**small).directory.resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    # A new process has neither the project's folder on its path nor the modules of the user's.
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry not in ("", str(project))])
    for name in [name for name in sys.modules if name.startswith(("package", "legato_own_"))]:
        monkeypatch.delitem(sys.modules, name)
    run = cut_run(whole, tmp_path / "cut" / "run", 1)
    monkeypatch.setattr("legato.run.train.seconds_of_training", lambda records: 1000.0)
    resume(run)
    assert RunDirectory.open(run).metrics()[-1]["seconds"] > 1000
    assert differences(outcome(whole), outcome(run)) == []
    target = find(str(run))
    export(target, tmp_path / "exported")
    assert evaluate(target, samples=1).problems == 4
    written = tomllib.loads((run / "config.toml").read_text())
    assert written["task"]["kind"] == f"{project}/mine.py:Mine" and written["task"]["source"] == f"{project}/data.jsonl"
    assert written["algorithm"]["objective.trust"] == [f"{project}/clip.py:MyClip"]
    hashed = {code["file"] for code in records(run)[0]["code"]}
    assert hashed == {str(project / name) for name in ("clip.py", "mine.py", "package/__init__.py", "package/rewards.py")}


def test_only_what_is_a_file_becomes_absolute(project: Path) -> None:
    (project / "test").mkdir()
    (project / "tiny").mkdir()
    words = ["task.kind=gsm8k", "task.path=data.jsonl", "task.split=test", "policy.warm_up.cache=warm"]
    config = absolute_paths(load([], words)).config
    assert config.task.options["path"] == str(project / "data.jsonl")
    assert (config.task.options["split"], config.policy.model) == ("test", "tiny")
    assert config.policy.warm_up is not None and config.policy.warm_up.cache == str(project / "warm")
    assert absolute_paths(load([], ["policy.model=test"])).config.policy.model == str(project / "test")
    assert absolute_paths(load([], ["policy.model=Qwen/Qwen3-0.6B"])).config.policy.model == "Qwen/Qwen3-0.6B"
    kept = absolute_paths(load([], words), lambda path: path != "task.path")
    assert kept.config.task.options["path"] == "data.jsonl"
