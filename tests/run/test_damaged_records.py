"""Damaged or deleted records do not keep a run from its sound checkpoints: they are repaired, and the loss is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legato.compare.jobs import jobs
from legato.compare.store import Store
from legato.pages.report import write_report
from legato.records.directory import RunDirectory
from legato.run.evaluate import evaluate
from legato.run.target import find
from legato.run.train import resume
from tests.proof import verdicts
from tests.proof.command import Command
from tests.proof.comparisons import definition
from tests.proof.runs import Listener, alter_state, cut_run, differences, outcome, records, run_small, words

OPTIONS: dict[str, Any] = {
    "training.steps": 3,
    "evaluation.every_steps": 0,
    "output.rollouts_every_steps": 0,
    "reward.kind": f"{verdicts.__file__}:early",
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("straight"), OPTIONS).directory


def empty(path: Path) -> None:
    path.write_bytes(b"")


def drop_the_first_half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[len(data) // 2 :])


def break_a_line(kind: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        lines = path.read_text().splitlines(keepends=True)
        number = next(number for number, line in enumerate(lines) if json.loads(line)["kind"] == kind)
        lines[number] = "#" + lines[number][1:]
        path.write_text("".join(lines))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "steps 1 to 2 are lost"),
    "emptied": (empty, "steps 1 to 2 are lost"),
    "first half gone": (drop_the_first_half, "lost"),
    "a step": (break_a_line("step"), "step 1 are lost"),
    "the start": (break_a_line("start"), "all steps are there"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_are_repaired_and_the_run_goes_on(damage: str, straight: Path, tmp_path: Path) -> None:
    run = cut_run(straight, tmp_path, 2)
    metrics = run / "metrics.jsonl"
    destroy, lost = DAMAGES[damage]
    destroy(metrics)
    before = metrics.read_bytes() if metrics.exists() else b""
    listener = Listener()
    assert resume(run, watcher=listener).exit_code == 0
    assert "metrics.jsonl was damaged" in listener.said and lost in listener.said
    after, first = outcome(run), outcome(straight)
    assert differences(first, after) == ["metrics"]
    lines = records(run)
    assert lines[0]["kind"] == "start" and lines[0]["model"] == "tiny"
    assert [line for line in lines if line["kind"] == "step"][-1] == [
        line for line in first["metrics"] if line["kind"] == "step"
    ][-1]
    assert any(line["kind"] == "note" and lost in line["text"] for line in lines)
    if before:
        assert (run / "metrics-damaged-1.jsonl").read_bytes() == before
    # Repaired once: every checkpoint can be resumed without another repair, and the report can be written.
    listener = Listener()
    resume(run, step=2, watcher=listener)
    assert "was damaged" not in listener.said and not (run / "metrics-damaged-2.jsonl").exists()
    assert write_report(RunDirectory.open(run)).is_file()


def test_damage_after_the_checkpoint_is_cut_off(straight: Path, tmp_path: Path) -> None:
    run = cut_run(straight, tmp_path, 2)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:-2], b"#\n", lines[-1]]))
    resume(run)
    assert differences(outcome(straight), outcome(run)) == []


def test_damaged_findings_are_repaired(straight: Path, tmp_path: Path) -> None:
    run = cut_run(straight, tmp_path, 2)
    (run / "health.jsonl").write_bytes(b'{"kind": "finding", "step": 1}\nnoise\n{"kind": "finding", "step": 9}\n')
    alter_state(run / "checkpoints" / "step-000002", lambda state: state["health"].update(position=70))
    listener = Listener()
    resume(run, watcher=listener)
    assert "health.jsonl was damaged" in listener.said
    steps = [record["step"] for record in RunDirectory.open(run).health.read()]
    assert steps[0] == 1 and 9 not in steps


def test_verbs_that_need_only_weights_work_without_records(straight: Path, tmp_path: Path) -> None:
    run = cut_run(straight, tmp_path, 2)
    for name in ("metrics.jsonl", "environment.json"):
        (run / name).unlink()
    assert evaluate(find(str(run), ["reward.kind=exact"]), samples=1, greedy=False, problems=2).problems == 2
    (run / "environment.json").write_text("{")
    listener = Listener()
    resume(run, watcher=listener)
    assert "environment.json was missing or damaged" in listener.said
    assert RunDirectory.open(run).environment()["seed"] == 0


def test_a_comparison_does_not_delete_a_run_whose_records_are_damaged(straight: Path, tmp_path: Path) -> None:
    """A run that can only start again is deleted; one with a checkpoint is resumed."""
    store, job = Store(tmp_path), jobs(definition(seeds=(0,)), tmp_path)[0]
    shutil.copytree(straight, store.run_path(job))
    (store.run_path(job) / "metrics.jsonl").write_text("noise\nnoise\nnoise\n")
    assert store.state(job) == "stopped"


REWARD = """
import pathlib
RUN = pathlib.Path(__file__).parent / "run"
CALLS = []

def vandal(rollout):
    CALLS.append(1)
    if len(CALLS) == 40:
        (RUN / "config.toml").unlink()
        (RUN / "environment.json").unlink()
        lines = (RUN / "metrics.jsonl").read_text().splitlines(keepends=True)
        (RUN / "metrics.jsonl").write_text("".join(["#", *lines]))
    return float(len(rollout.tokens) % 2)
"""


def test_files_deleted_during_the_run_do_not_fail_a_finished_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vandal.py").write_text(REWARD)
    chosen = words(tmp_path, {**OPTIONS, "reward.kind": f"{tmp_path / 'vandal.py'}:vandal"})
    code, out, err = Command(monkeypatch, capfd)("train", *chosen)
    assert code == 0, err
    assert "config.toml was deleted" in " ".join(out.split()) and "metrics.jsonl was damaged" in " ".join(out.split())
    directory = RunDirectory.open(tmp_path / "run")
    assert [record["step"] for record in directory.metrics() if record["kind"] == "step"] == [1, 2, 3]
    assert directory.report_path.is_file() and directory.environment()["seed"] == 0
    assert resume(tmp_path / "run").exit_code == 0
