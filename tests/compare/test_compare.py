"""Whole comparisons in processes of their own: stopped, killed, failing, changed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from legato.compare.compare import compare
from legato.compare.processes import Machine
from legato.pages.comparison_tables import tables
from legato.records.directory import RunDirectory
from tests.proof import verdicts
from tests.proof.command import Command, assert_refused
from tests.proof.comparisons import OPTIONS, definition
from tests.proof.runs import differences, outcome

ARMS = ("--arm", "grpo", "--arm", "gspo", "--seeds", "0,1")
RUNS = ("grpo-seed0", "gspo-seed0", "grpo-seed1", "gspo-seed1")
WORDS = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in OPTIONS.items()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms, two seeds, to the end. One worker trains them all: each more takes seconds to start."""
    folder = tmp_path_factory.mktemp("straight") / "comparison"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEGATO_TEST_SLEEP", "0")
        patch.setenv("OMP_NUM_THREADS", "1")  # the number of threads changes the order of sums
        compared = compare(definition(), folder=folder, machine=Machine(), say=lambda text: None)
    assert compared.exit_code == 0
    return folder


def test_every_arm_and_seed_is_an_ordinary_run(straight: Path) -> None:
    results = json.loads((straight / "compare.json").read_text())
    assert [run["name"] for run in results["runs"]] == list(RUNS)
    for run in results["runs"]:
        directory = RunDirectory.open(straight / "runs" / run["name"])
        assert directory.metrics()[-1]["reason"] == "all steps done"
        assert directory.report_path.is_file() and directory.checkpoint_steps()[-1] == 4
        assert (run["steps"], run["updates"]) == (4, 8)
        assert run["tokens"] > 0 and run["seconds"] > 0
        assert [each["step"] for each in run["evaluations"]] == [0, 2, 4]
    assert results["points"][0]["seeds"] == [0, 1]
    assert (straight / "compare.html").stat().st_size > 100_000
    assert "| gspo | " in (straight / "compare.md").read_text()


def test_arms_start_from_the_same_weights_and_problems_and_seeds_do_not(straight: Path) -> None:
    runs = {run["name"]: run for run in json.loads((straight / "compare.json").read_text())["runs"]}
    for seed in (0, 1):
        assert runs[f"grpo-seed{seed}"]["origin"] == runs[f"gspo-seed{seed}"]["origin"]
    for what in ("weights", "problems"):
        assert runs["grpo-seed0"]["origin"][what] != runs["grpo-seed1"]["origin"][what]
    assert runs["grpo-seed0"]["start"] == runs["gspo-seed0"]["start"]


def test_the_same_command_again_runs_nothing_and_prints_the_table(
    straight: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (straight / "runs").rglob("metrics.jsonl")}
    code, output, _ = Command(monkeypatch, capsys)("compare", *WORDS, *ARMS, "--out", str(straight))
    assert code == 0
    assert "4 runs, 4 finished" in output and "starts" not in output
    assert all(each.title in output for each in tables(json.loads((straight / "compare.json").read_text()))[:2])
    assert "compare.html" in output
    assert before == {path: path.stat().st_mtime_ns for path in (straight / "runs").rglob("metrics.jsonl")}


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("training.lr=1e-4",), ["training.lr", "0.0001", "0.003", "grpo-seed0"]),
        (("--seeds", "0,1,2"), ["seeds", "[0, 1, 2]", "[0, 1]"]),
        (("--arm", "dapo"), ["arms", "['grpo', 'gspo', 'dapo']", "['grpo', 'gspo']"]),
        (("--sweep", "training.lr=1e-3,1e-2"), ["sweep", "'training.lr': [0.001, 0.01]"]),
    ],
)
def test_a_comparison_that_changed_is_refused(
    words: tuple[str, ...],
    fragments: list[str],
    straight: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = (straight / "compare.json").read_bytes()
    options = [word for word in WORDS if not word.startswith("training.lr=")] if "--sweep" in words else WORDS
    arguments = ("compare", *options, *ARMS, *words, "--out", str(straight))
    assert_refused(Command(monkeypatch, capsys)(*arguments), "another comparison", *fragments, "--out")
    assert (straight / "compare.json").read_bytes() == before


class Comparing:
    """`legato compare` as a process."""

    def __init__(self, folder: Path, sleep: str, seeds: str) -> None:
        arguments = ("--arm", "grpo", "--arm", "gspo", "--seeds", seeds, "--out", str(folder), "--parallel", "2")
        words = [sys.executable, "-m", "legato.cli.main", "compare", *WORDS, *arguments]
        self.folder = folder
        self.inner = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "LEGATO_TEST_SLEEP": sleep, "OMP_NUM_THREADS": "1"},
        )

    def wait_for_steps(self, *names: str) -> None:
        deadline = time.monotonic() + 120
        while not all(self._stepped(name) for name in names):
            assert self.inner.poll() is None and time.monotonic() < deadline, self.inner.communicate()[0]
            time.sleep(0.05)

    def _stepped(self, name: str) -> bool:
        path = self.folder / "runs" / name / "metrics.jsonl"
        return path.is_file() and '"kind":"step"' in path.read_text()

    def end(self) -> str:
        output, _ = self.inner.communicate(timeout=120)
        return output


def free(run: Path) -> bool:
    """Whether no process works in a run directory."""
    import fcntl

    with (run / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def same(straight: Path, other: Path, name: str) -> list[str]:
    """What differs between a run and its straight form, but for saves and what others drew from global generators."""
    pair = (outcome(each / "runs" / name, checkpoints=False) for each in (straight, other))
    return [what for what in differences(*pair) if what not in ("trainer.json/generators", "random.safetensors")]


def stopped(folder: Path, number: signal.Signals, seeds: str) -> str:
    """A comparison that got a signal in the middle of its first runs, and what it said."""
    process = Comparing(folder, "0.15", seeds)
    process.wait_for_steps(*RUNS[:2])
    process.inner.send_signal(number)
    output = process.end()
    assert process.inner.returncode == (143 if number == signal.SIGTERM else -number), output
    deadline = time.monotonic() + 60
    while not all(free(folder / "runs" / name) for name in RUNS[:2]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return output


def test_a_stopped_comparison_resumes_and_equals_the_straight_one(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "comparison"
    output = stopped(folder, signal.SIGTERM, "0,1")
    assert "stopped  grpo-seed0" in output and "4 of 4 runs" in output
    assert not (folder / "runs" / "gspo-seed1").exists()
    monkeypatch.setenv("LEGATO_TEST_SLEEP", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    messages: list[str] = []
    assert compare(definition(), folder=folder, say=messages.append).exit_code == 0
    events = {line.split(":")[0] for line in messages[1:]}
    assert {"resumes  grpo-seed0", "resumes  gspo-seed0", "starts   gspo-seed1"} <= events
    for name in RUNS:
        assert same(straight, folder, name) == [], name


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_runs_of_a_comparison_that_was_killed_save_and_end(tmp_path: Path) -> None:
    """It cannot pass anything on: its runs notice by themselves."""
    folder = tmp_path / "comparison"
    stopped(folder, signal.SIGKILL, "0")
    assert not (folder / "compare.json").exists()
    for name in RUNS[:2]:
        run = RunDirectory.open(folder / "runs" / name)
        steps = [line["step"] for line in run.metrics() if line["kind"] == "step"]
        assert steps and run.checkpoint_steps()[-1] == steps[-1], name


def test_a_run_without_a_checkpoint_starts_again(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_TEST_SLEEP", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "comparison"
    shutil.copytree(straight, folder)
    run = folder / "runs" / "gspo-seed1"
    shutil.rmtree(run / "checkpoints")
    directory = RunDirectory.open(run)
    directory.metrics_file.truncate(directory.metrics_path.read_bytes().index(b"\n") + 1)
    messages: list[str] = []
    compare(definition(), folder=folder, say=messages.append)
    events = [line.split(":")[0] for line in messages[1:] if not line.startswith("goes on")]
    assert events == ["starts   gspo-seed1", "done     gspo-seed1"]
    assert same(straight, folder, "gspo-seed1") == []


def test_a_failing_arm_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_TEST_SLEEP", "0")
    arms: dict[str, dict[str, Any]] = {
        "dies": {"reward.kind": f"{verdicts.__file__}:fatal"},
        "lost": {"policy.model": str(tmp_path / "nowhere")},
        "fine": {},
    }
    comparison = definition(arms=arms, seeds=(0,), unequal=True)
    folder = tmp_path / "comparison"
    messages: list[str] = []
    compared = compare(comparison, folder=folder, say=messages.append)
    assert compared.exit_code == 0
    runs = {run["arm"]: run for run in compared.results["runs"]}
    assert {arm: run["status"] for arm, run in runs.items()} == {"dies": "failed", "lost": "failed", "fine": "done"}
    assert runs["dies"]["reason"].startswith("exit code 7: out of memory")
    assert runs["dies"]["score"] == runs["dies"]["evaluations"][-1]["sampled"] and runs["dies"]["steps"] >= 1
    assert runs["lost"]["score"] == 0.0 and "nowhere" in runs["lost"]["reason"]
    assert compared.results["points"][0]["arms"]["lost"]["failed"] == 1
    assert any(line.startswith("failed   lost-seed0") for line in messages)
    assert {each.split()[0] for each in compared.results["unequal"]} == {"reward.kind", "policy.model"}
    # What failed is not tried again by itself, and is when that is asked for.
    messages.clear()
    compare(comparison, folder=folder, say=messages.append)
    assert len(messages) == 1
    compare(comparison, folder=folder, say=messages.append, retry_failed=True)
    assert "starts   lost-seed0" in messages and "resumes  dies-seed0" in messages


def test_a_comparison_in_which_every_run_fails_is_an_error(tmp_path: Path) -> None:
    comparison = definition(options={**OPTIONS, "policy.model": str(tmp_path / "nowhere")}, seeds=(0,))
    with pytest.raises(ValueError, match=r"every run failed.*exit code 2.*nowhere"):
        compare(comparison, folder=tmp_path / "comparison", machine=Machine(parallel=2), say=lambda text: None)


def test_two_comparisons_do_not_share_a_folder(
    straight: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from legato.records.lock import hold_lock

    with hold_lock(RunDirectory(straight)):
        result = Command(monkeypatch, capsys)("compare", *WORDS, *ARMS, "--out", str(straight))
    assert_refused(result, "in use")
