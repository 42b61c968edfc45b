"""`legato runs`: the list, and what --prune removes."""

import json
import shutil
from pathlib import Path

import pytest

from legato.cli.runs import format_bytes, runs_command
from legato.errors import InputError
from legato.records.directory import RunDirectory
from legato.records.lock import hold_lock
from legato.run.prune import removable
from tests.proof.runs import light, run_small

OPTIONS = {"training.steps": 3, "evaluation.every_steps": 1, "output.checkpoint_every_steps": 1, "output.keep_last": 9}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with light():
        directory = run_small(tmp_path_factory.mktemp("trained"), OPTIONS, progress=False).directory
    (directory / "report.html").write_text("a report")
    return directory


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "runs" / "mine")
    return tmp_path / "runs"


def test_runs_are_listed_with_state_step_score_and_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = folder / "dead"
    shutil.copytree(folder / "mine", dead)
    lines = (dead / "metrics.jsonl").read_text().splitlines(keepends=True)
    (dead / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["kind"] != "end"))
    with hold_lock(RunDirectory(folder / "mine")):
        runs_command(folder, prune=False, yes=False)
    listed = capsys.readouterr().out
    assert " ".join(listed.split()).find("dead no end recorded 3/3") > 0 and "mine running" in " ".join(listed.split())
    runs_command(folder, prune=False, yes=False)
    listed = " ".join(capsys.readouterr().out.split())
    assert "mine all steps done 3/3" in listed and "% at step" in listed and "B" in listed.split("% at step")[1]
    with pytest.raises(InputError, match="no folder"):
        runs_command(folder / "nothing", prune=False, yes=False)


def test_a_run_that_failed_stands_on_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in (folder / "mine" / "metrics.jsonl").read_text().splitlines()]
    error = "expected a reward that scores rollouts, got no score for any of the first 256: boom: ValueError: no"
    lines = [json.dumps(each | ({"reason": error} if each["kind"] == "end" else {})) + "\n" for each in records]
    (folder / "mine" / "metrics.jsonl").write_text("".join(lines))
    runs_command(folder, prune=False, yes=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "expected a reward" in line]
    assert line.startswith("mine") and "expected a reward that scores rol..." in line and "3/3" in line


def test_prune_lists_first_and_then_keeps_records_and_the_newest_good_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(folder / "mine")
    best = json.loads((run.checkpoint_path(3) / "trainer.json").read_text())["best"][1]
    before = sorted(folder.rglob("*"))
    runs_command(folder, prune=True, yes=False)
    assert "nothing was removed" in capsys.readouterr().out and sorted(folder.rglob("*")) == before
    with hold_lock(run):
        runs_command(folder, prune=True, yes=True)
    assert sorted(folder.rglob("*")) == before
    capsys.readouterr()
    runs_command(folder, prune=True, yes=True)
    assert "removed" in capsys.readouterr().out and "step-000001" in str(before)
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == {"step-000003", best}
    assert not run.report_path.exists() and len(run.rollout_steps()) > 1 and run.metrics_path.is_file()
    assert removable(run) == []


def test_prune_keeps_the_newest_checkpoint_that_is_whole(folder: Path) -> None:
    run = RunDirectory(folder / "mine")
    (run.checkpoint_path(3) / "model" / "model.safetensors").write_bytes(b"torn")
    kept = {each.path.name for each in removable(run)}
    assert "step-000002" not in kept and {"step-000003", "report.html"} <= kept
    for step in (1, 2):
        shutil.rmtree(run.checkpoint_path(step) / "model")
    assert [each.path.name for each in removable(run)] == ["report.html"]


def test_prune_keeps_the_checkpoint_to_go_back_to_after_an_alarm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered() -> list[str]:
        return [each.path.name for each in removable(run) if each.path.name.startswith("step-")]

    run = RunDirectory(folder / "mine")
    state = json.loads((run.checkpoint_path(3) / "trainer.json").read_text())
    monkeypatch.setattr("legato.run.prune.checkpoint.read_state", lambda folder: {**state, "best": None})
    assert offered() == ["step-000001", "step-000002"]
    run.append_metrics({"kind": "end", "reason": "stopped by the health watch", "step": 3, "healthy": 2})
    assert offered() == ["step-000001"]
    # A later end without an alarm counts alone.
    run.append_metrics({"kind": "end", "reason": "all steps done", "step": 3})
    assert offered() == ["step-000001", "step-000002"]
    config = run.config_path.read_text()
    assert config.count('action = "say"') == 1
    # No checkpoint is old enough to be healthy at step 3: the oldest is the one to go back to.
    run.config_path.write_text(config.replace('action = "say"', 'action = "stop"'))
    assert offered() == ["step-000002"]
    run.config_path.unlink()
    assert offered() == ["step-000002"]


def test_prune_keeps_a_checkpoint_that_was_being_saved_again(folder: Path) -> None:
    run = RunDirectory(folder / "mine")
    before = run.path / "checkpoints" / ".step-000003.before.partial"
    run.checkpoint_path(3).rename(before)
    (before.parent / ".step-000003.partial").mkdir()
    runs_command(folder, prune=True, yes=True)
    assert before.is_dir() and run.checkpoint_path(2).is_dir()
    assert not (before.parent / ".step-000003.partial").exists()
    shutil.copytree(before, run.checkpoint_path(3))
    assert before in [each.path for each in removable(run)]  # saved again: the old one is left over


def test_sizes_in_words() -> None:
    assert [format_bytes(size) for size in (0, 999, 1500, 2.5e6, 7e9, 3e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "7.0 GB",
        "3.0 TB",
    ]
