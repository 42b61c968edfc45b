"""Runs that are begun again: after a start that failed, after a kill, and by a requeued job."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from legato.errors import InputError
from legato.records.begun import begun_steps, clear_begun
from legato.records.directory import RunDirectory
from legato.run.train import train
from tests.proof import verdicts
from tests.proof.runs import SMALL, differences, outcome, run_small

OPTIONS = {
    "reward.kind": f"{verdicts.__file__}:early",
    "training.steps": 2,
    "evaluation.every_steps": 0,
    "output.checkpoint_every_steps": 0,
    "output.rollouts_every_steps": 0,
}

pytestmark = pytest.mark.usefixtures("lightly")


class Killed(BaseException):
    """Stands for a killed process."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("straight"), OPTIONS).directory


def kill_after(step: int) -> Any:
    def after_step(report: Any) -> None:
        if report.step == step:
            raise Killed

    return after_step


def fail(*rest: Any, **more: Any) -> Any:
    raise RuntimeError("no memory")


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("legato.run.train._loggers", "legato.run.train.prepare", "legato.run.wire.trainer_of"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            with pytest.raises(RuntimeError, match="no memory"):
                run_small(tmp_path, OPTIONS)
        assert list(tmp_path.iterdir()) == []


def test_a_run_killed_before_its_first_step_is_begun_again(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*rest: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("legato.run.train.prepare", killed)
        with pytest.raises(Killed):
            run_small(tmp_path, OPTIONS)
    assert (tmp_path / "run" / "config.toml").is_file()
    run = run_small(tmp_path, OPTIONS).directory
    assert differences(outcome(straight), outcome(run)) == []


def test_a_requeued_job_begins_again_without_a_checkpoint_and_else_goes_on(straight: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_small(tmp_path, OPTIONS, callback=kill_after(1), resume_if_exists=True)
    with pytest.raises(InputError, match="never overwritten"):  # steps were recorded
        run_small(tmp_path, OPTIONS)
    run = run_small(tmp_path, OPTIONS, resume_if_exists=True).directory
    assert differences(outcome(straight), outcome(run)) == []
    kept = run / "given-up" / "start-1" / "metrics.jsonl"
    assert '"kind":"step"' in kept.read_text()
    longer = {**OPTIONS, "training.steps": 3}
    assert run_small(tmp_path, longer, resume_if_exists=True).exit_code == 0
    records = RunDirectory.open(run).metrics()
    assert [each["step"] for each in records if each["kind"] == "step"] == [1, 2, 3]
    with pytest.raises(InputError, match=r"training\.lr = 0\.001 .*--allow-changes"):
        run_small(tmp_path, {**longer, "training.lr": 1e-3}, resume_if_exists=True)
    changed = run_small(tmp_path, {**longer, "training.lr": 1e-3}, resume_if_exists=True, allow_changes=True)
    assert changed.exit_code == 0 and "lr = 0.001" in RunDirectory.open(run).config_path.read_text()


def test_the_size_of_a_checkpoint_is_told_at_the_start(straight: Path) -> None:
    directory = RunDirectory.open(straight)
    (note,) = [each for each in directory.metrics()[0]["notes"] if "a checkpoint is about" in each]
    files = [path for path in (straight / "checkpoints" / "step-000002").rglob("*") if path.suffix == ".safetensors"]
    told = float(note.split()[4]) * {"kB": 1e3, "MB": 1e6}[note.split()[5].rstrip(",")]
    assert told == pytest.approx(sum(path.stat().st_size for path in files), rel=0.1)
    assert "the newest 100 are kept" in note


def test_a_requeued_job_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"output\.name"):
        run_small(tmp_path, {**OPTIONS, "output.name": None}, resume_if_exists=True)


def test_files_of_others_are_never_cleared(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="never overwritten"):
        run_small(tmp_path, OPTIONS)
    with pytest.raises(InputError):
        run_small(tmp_path, OPTIONS, resume_if_exists=True)
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


def test_a_requeued_job_goes_on_with_a_run_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paths are relative to the same files, and its adapters have the learning rate of full training."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(verdicts.__file__, "own.py")
    options = {**OPTIONS, "reward.kind": "own.py:early", "policy.lora.rank": 2}
    small = {path: value for path, value in SMALL.items() if path != "training.lr"}
    words = {**small, **options, "output.directory": "runs", "output.name": "run"}
    run = train(progress=False, **words, **{"training.lr": 1e-6})
    config = run.directory / "config.toml"
    config.write_text(config.read_text().replace(f"{tmp_path}/own.py", "own.py"))
    again = train(progress=False, resume_if_exists=True, **words)
    assert again.exit_code == 0 and RunDirectory.open(run.directory).metrics()[-1]["reason"] == "all steps done"


def contents(folder: Path) -> dict[str, str]:
    """The text of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("names", [["config.toml"], ["config.toml", ".lock", "rollouts/mine.txt", "wandb/mine.txt"]])
def test_a_folder_that_only_has_the_names_of_a_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    folder = tmp_path / "run"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    before = contents(folder)
    assert begun_steps(RunDirectory(folder)) is None
    monkeypatch.setattr("legato.run.train._loggers", fail)
    with pytest.raises(InputError, match="never overwritten"):
        run_small(tmp_path, OPTIONS)
    with pytest.raises(InputError):
        run_small(tmp_path, OPTIONS, resume_if_exists=True)
    assert contents(folder) == before


def test_a_run_is_known_by_what_it_wrote(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    assert begun_steps(run) is None  # an empty folder of anyone
    (run.path / ".lock").touch()
    (run.path / ".environment.json.partial").write_text("{")
    assert begun_steps(run) == 0
    (run.path / "environment.json").write_text("{}")
    assert begun_steps(run) is None  # not as a run writes it
    run.write_environment({})
    assert begun_steps(run) == 0
    run.environment_path.unlink()
    run.append_metrics({"kind": "start"})
    assert begun_steps(run) == 0
    run.checkpoint_path(1).mkdir(parents=True)
    assert begun_steps(run) is None


def test_a_start_marks_its_folder_before_it_writes_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = RunDirectory.write_config

    def write_and_die(directory: RunDirectory, text: str) -> None:
        write(directory, text)
        raise Killed

    monkeypatch.setattr(RunDirectory, "write_config", write_and_die)
    with pytest.raises(Killed):
        run_small(tmp_path, OPTIONS)
    assert begun_steps(RunDirectory(tmp_path / "run")) == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_begins_again_beside_files_of_others(tmp_path: Path, steps: int) -> None:
    run = RunDirectory.create(tmp_path, "run")
    run.write_environment({})
    run.append_metrics({"kind": "start"})
    for step in range(steps):
        run.append_metrics({"kind": "step", "step": step + 1})
    foreign, leftovers = ["train.log", "slurm-1.out"], [".config.toml.partial", ".report.html.partial"]
    for name in (*foreign, *leftovers, ".lock"):
        (run.path / name).write_text(name)
    assert begun_steps(run) == steps
    clear_begun(run)
    assert {path.name for path in run.path.iterdir()} - {"given-up"} == {*foreign, ".lock"}
    assert all((run.path / name).read_text() == name for name in foreign)
    assert (run.path / "given-up" / "start-1" / "metrics.jsonl").is_file() == bool(steps)


def test_damaged_records_of_a_run_that_begins_again_are_kept(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    run.append_metrics({"kind": "start"})
    (run.path / "metrics-damaged-1.jsonl").write_text("torn")
    assert begun_steps(run) == 0
    clear_begun(run)
    assert (run.path / "given-up" / "start-1" / "metrics-damaged-1.jsonl").read_text() == "torn"


def test_a_requeued_job_begins_again_beside_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("legato.run.train.prepare", lambda *rest: (_ for _ in ()).throw(Killed))
        run_small(tmp_path, OPTIONS)
    (tmp_path / "run" / "slurm-1.out").write_text("log")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr("legato.run.train.prepare", fail)  # a failed start does not take the log with it
        run_small(tmp_path, OPTIONS, resume_if_exists=True)
    assert run_small(tmp_path, {**OPTIONS, "training.steps": 1}, resume_if_exists=True).exit_code == 0
    assert (tmp_path / "run" / "slurm-1.out").read_text() == "log"
