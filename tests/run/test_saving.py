"""Writing checkpoints: crashes, full disks, states that must not be saved, and which checkpoints are kept."""

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.config.load import load
from legato.records.directory import RunDirectory
from legato.records.lines import Lines, RunDirectoryFullError
from legato.run import warm, wire
from legato.run.train import Run, resume
from legato.training import checkpoint
from legato.training.step import Trainer
from tests.proof import verdicts
from tests.proof.runs import Listener, cut_run, differences, outcome, records, run_small, state

EARLY = f"{verdicts.__file__}:early"


class Crash(BaseException):
    """Stands for a killed process: nothing catches this."""


def disk_full(*_: Any) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"training.steps": 3, "reward.kind": EARLY, "output.rollouts_every_steps": 0}
    return run_small(tmp_path_factory.mktemp("straight"), options).directory


Patch = Callable[[pytest.MonkeyPatch, BaseException], None]


def in_save_file(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fails(tensors: Any, path: Path, *_: Any, **__: Any) -> None:
        Path(path).write_bytes(b"torn")
        raise error

    patch.setattr(checkpoint, "save_file", fails)


def in_the_model(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fails(policy: Any, folder: Path, *_: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"torn")
        raise error

    patch.setattr(checkpoint, "save_model", fails)


def in_rename(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fails(*_: Any) -> None:
        raise error

    patch.setattr(Path, "rename", fails)


def in_fsync(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fails(path: Path) -> None:
        raise error

    patch.setattr(checkpoint, "_flush", fails)


def in_the_manifest(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    write = Path.write_text

    def fails(path: Path, text: str, *rest: Any, **more: Any) -> int:
        if path.name == "manifest.json":
            write(path, text[:20])
            raise error
        return write(path, text, *rest, **more)

    patch.setattr(Path, "write_text", fails)


def in_the_numbers(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    write = Path.write_text

    def fails(path: Path, text: str, *rest: Any, **more: Any) -> int:
        if path.name == "trainer.json":
            write(path, text[:20])
            raise error
        return write(path, text, *rest, **more)

    patch.setattr(Path, "write_text", fails)


PLACES: list[Patch] = [in_save_file, in_the_model, in_rename, in_fsync, in_the_manifest, in_the_numbers]


class OnPause(Listener):
    """Does something when the run says that it waits for room on the disk."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def message(self, text: str) -> None:
        super().message(text)
        if text.startswith("paused: "):
            self.action()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waits for room tries again at once."""
    monkeypatch.setattr("legato.run.room._RETRY_SECONDS", 0.0)


@contextmanager
def resume_with_failing_save(
    run: Path, place: Patch, error: BaseException, watcher: Listener | None = None
) -> Iterator[Run]:
    """Resume until the save after step 2, which fails."""
    with pytest.MonkeyPatch.context() as patch:

        def arm(report: Any) -> None:
            if report.step == 2:
                place(patch, error)

        yield resume(run, callback=arm, watcher=watcher)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_crash_while_saving_loses_nothing_but_that_save(place: Patch, straight: Path, tmp_path: Path) -> None:
    run = cut_run(straight, tmp_path, 1)
    with pytest.raises(Crash), resume_with_failing_save(run, place, Crash()):
        pass
    assert RunDirectory.open(run).checkpoint_steps() == [1]
    folder, warnings = checkpoint.latest(run / "checkpoints")
    assert (folder.name, warnings) == ("step-000001", [])
    resume(run)
    assert differences(outcome(straight), outcome(run)) == []
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002", "step-000003"]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_signal_while_the_disk_is_full_ends_the_run_and_keeps_the_last_checkpoint(
    place: Patch, straight: Path, tmp_path: Path
) -> None:
    run = cut_run(straight, tmp_path, 1)
    listener = OnPause(terminate)
    with resume_with_failing_save(run, place, disk_full(), listener) as ended:
        assert ended.exit_code == 143
    paused = next(line for line in listener.messages if line.startswith("paused: "))
    assert "step-000002" in paused and "disk is full" in paused
    assert "\n" not in ended.reason and "the state after step 1 is saved" in ended.reason
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    resume(run)
    assert differences(outcome(straight), outcome(run)) == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("place", [in_save_file, in_rename])
def test_a_full_disk_pauses_the_run_until_there_is_room(place: Patch, straight: Path, tmp_path: Path) -> None:
    run = cut_run(straight, tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        listener = OnPause(patch.undo)
        ended = resume(run, callback=lambda report: place(patch, disk_full()), watcher=listener)
    assert ended.exit_code == 0
    assert sum(line.startswith("there is room again") for line in listener.messages) == 2
    assert differences(outcome(straight), outcome(run)) == []


WARM = {
    "algorithm": "grpo",
    "algorithm.objective.penalties.kl.beta": 0.1,
    "policy.warm_up.steps": 2,
    "policy.warm_up.examples_per_step": 4,
    "training.steps": 1,
    "evaluation.every_steps": 0,
    "reward.kind": EARLY,
}


def in_the_record(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    append = Lines._append

    def fails(lines: Lines, line: bytes, sync: bool) -> None:
        if b'"warm-up"' in line:
            raise RunDirectoryFullError("no room for a record")
        append(lines, line, sync)

    patch.setattr(Lines, "_append", fails)


def in_the_cache(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fails(tensors: Any, path: Path) -> None:
        raise error

    patch.setattr(warm, "save_file", fails)


@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(60)
def test_a_full_disk_during_the_warm_up_pauses_the_run(tmp_path: Path) -> None:
    """It is full for a record, for the cache of warm-ups and for the reference."""
    places: list[Patch] = [in_the_record, in_the_cache, in_fsync]
    with pytest.MonkeyPatch.context() as patch:

        def make_room() -> None:
            patch.undo()
            if places:
                places.pop(0)(patch, disk_full())

        make_room()
        listener = OnPause(make_room)
        options = {**WARM, "policy.warm_up.cache": str(tmp_path / "cache")}
        assert run_small(tmp_path, options, watcher=listener).exit_code == 0
    assert sum(line.startswith("there is room again") for line in listener.messages) == 3
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1


def test_a_signal_while_the_disk_is_full_during_the_warm_up_ends_the_run(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        in_the_record(patch, disk_full())
        ended = run_small(tmp_path, WARM, watcher=OnPause(terminate))
    assert ended.exit_code == 143 and "during the warm-up: there is no checkpoint to resume from" in ended.reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.usefixtures("impatient")
def test_a_disk_that_is_really_full_pauses_the_run(tmp_path: Path) -> None:
    """Records, rollouts, checkpoints and evidence on a disk that another file fills after the first step."""
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    filler = disk / "filler"

    def fill(report: Any) -> None:
        if report.step == 1:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 12))

    try:
        listener = OnPause(lambda: filler.unlink(missing_ok=True))
        options = {"training.steps": 2, "reward.kind": EARLY, "output.keep_last": 1}
        assert run_small(disk, options, callback=fill, watcher=listener).exit_code == 0
        assert len([line for line in listener.messages if line.startswith("paused: ")]) == 1
        checkpoint.verify(disk / "run" / "checkpoints" / "step-000002")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_signal_while_there_is_no_room_for_metrics_ends_the_run(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut_run(straight, tmp_path, 1)
    opened = Path.open

    def fails(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if path.name == "metrics.jsonl" and "a" in mode:
            raise disk_full()
        return opened(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", fails)
    ended = resume(run, watcher=OnPause(terminate))
    assert ended.exit_code == 143 and "the disk is full" in ended.reason
    monkeypatch.undo()
    resume(run)
    assert differences(outcome(straight), outcome(run)) == []


@pytest.mark.usefixtures("impatient")
def test_too_little_disk_space_pauses_before_a_checkpoint_is_written(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut_run(straight, tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))

    def make_room() -> None:
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    listener = OnPause(make_room)
    assert resume(run, watcher=listener).exit_code == 0
    assert any("no room for a checkpoint" in line for line in listener.messages)
    assert differences(outcome(straight), outcome(run)) == []


def test_a_crash_at_any_flush_leaves_the_old_or_the_new_checkpoint_complete(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = load([straight / "config.toml"])
    policy = wire.policy_of(resolved, wire.PythonObjects())
    source = wire.source_of(resolved.config, wire.PythonObjects())
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, wire.PythonObjects()))
    trainer = wire.trainer_of(resolved, policy, collector, None)
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(straight / "checkpoints" / "step-000001", checkpoints / "step-000001")
    flush, calls = os.fsync, [0]

    def flush_or_crash(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == die_at:
            raise Crash
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flush_or_crash)
    die_at = 0
    checkpoint.save(checkpoints / "step-000002", policy, trainer.optimizer, {})
    total = calls[0]
    # Every file, the folders they are in, and the folder of checkpoints after the rename.
    assert total >= len([path for path in (checkpoints / "step-000002").rglob("*") if path.is_file()]) + 2
    for number in range(1, total + 1):
        shutil.rmtree(checkpoints / "step-000002", ignore_errors=True)
        die_at, calls[0] = number, 0
        with pytest.raises(Crash):
            checkpoint.save(checkpoints / "step-000002", policy, trainer.optimizer, {})
        folder, warnings = checkpoint.latest(checkpoints)
        assert warnings == []
        # Only the last flush comes after the rename.
        assert folder.name == ("step-000002" if number == total else "step-000001")


def test_the_last_evaluation_leaves_the_rollouts_of_the_last_step(tmp_path: Path) -> None:
    """Whether the evaluation belongs to the step or comes after it, at the end only."""
    rollouts = {}
    for every in (0, 2):
        run = run_small(tmp_path / str(every), {"training.steps": 2, "reward.kind": EARLY, "evaluation.every_steps": every})
        rollouts[every] = RunDirectory.open(run.directory).read_rollouts(2)
    assert rollouts[0] == rollouts[2]
    trained = [each for each in rollouts[0] if not each.get("held_out")]
    assert len(trained) == 16 and all("details" in each for each in trained) and len(rollouts[0]) == 16 + 4


# States that must not be saved


def poison_after_step_2(monkeypatch: pytest.MonkeyPatch, poison: Callable[[Trainer], None]) -> None:
    """Make the state not finite after step 2."""
    step = Trainer.step

    def step_then_poison(trainer: Trainer, *rest: Any) -> Any:
        report = step(trainer, *rest)
        if report.step == 2:
            poison(trainer)
        return report

    monkeypatch.setattr(Trainer, "step", step_then_poison)


@torch.no_grad()
def poison_weight(trainer: Trainer) -> None:
    next(iter(trainer.policy.parameters().values())).view(-1)[0] = torch.nan


@torch.no_grad()
def poison_moment(trainer: Trainer) -> None:
    next(iter(trainer.optimizer.inner.state.values()))["exp_avg"].view(-1)[0] = torch.inf


@pytest.mark.parametrize("poison", [poison_weight, poison_moment])
def test_a_state_that_is_not_finite_is_not_saved(
    poison: Callable[[Trainer], None], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut_run(straight, tmp_path, 1)
    poison_after_step_2(monkeypatch, poison)
    with pytest.raises(ValueError, match="not finite"):
        resume(run, ["training.steps=2", "evaluation.every_steps=0"])
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]


# Which checkpoints are kept


def test_the_newest_few_and_the_best_are_kept(tmp_path: Path) -> None:
    options = {"training.steps": 6, "reward.kind": EARLY, "evaluation.every_steps": 1, "output.keep_last": 2}
    run = run_small(tmp_path, {**options, "training.lr": 3e-2}).directory
    accuracy = {r["step"]: r["eval/accuracy_sampled"] for r in records(run) if r["kind"] == "evaluation" and r["step"]}
    best = max(accuracy, key=lambda step: (accuracy[step], -step))
    assert RunDirectory.open(run).checkpoint_steps() == sorted({best, 5, 6})


def test_the_best_is_kept_while_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.0, 0.5, 0.9, 0.1, 0.2, 0.9, 0.3])

    def fake_accuracy(name: str, answered: Any) -> dict[str, float]:
        return {f"eval/accuracy_{name}": next(accuracies)} if name == "sampled" else {}

    monkeypatch.setattr("legato.run.execute.accuracy_metrics", fake_accuracy)
    options = {"training.steps": 6, "evaluation.every_steps": 1, "evaluation.greedy": False, "output.keep_last": 1}
    run = run_small(tmp_path, options).directory
    assert RunDirectory.open(run).checkpoint_steps() == [2, 6]
    accuracies = iter([0.4, 0.95, 0.5])
    resume(run, ["training.steps=9"])
    assert RunDirectory.open(run).checkpoint_steps() == [8, 9]


def test_one_whole_checkpoint_exists_at_any_time(tmp_path: Path) -> None:
    names = []

    def record_newest(report: Any) -> None:
        if report.step > 1:
            names.append(checkpoint.latest(tmp_path / "run" / "checkpoints")[0].name)

    run_small(tmp_path, {"output.keep_last": 1, "evaluation.every_steps": 0}, callback=record_newest)
    assert names == ["step-000001", "step-000002", "step-000003"]


def test_a_checkpoint_deleted_by_someone_else_stops_nothing(tmp_path: Path) -> None:
    def delete(report: Any) -> None:
        if report.step == 3:
            shutil.rmtree(tmp_path / "run" / "checkpoints")

    run = run_small(tmp_path, {"evaluation.every_steps": 0}, callback=delete)
    assert run.exit_code == 0
    assert RunDirectory.open(run.directory).checkpoint_steps() == [3, 4]


def test_damaged_checkpoints_do_not_push_out_whole_ones(straight: Path, tmp_path: Path) -> None:
    """Two newer checkpoints are damaged; the next saved checkpoint must not be deleted instead of them."""
    run = cut_run(straight, tmp_path, 1)
    for step in (8, 9):
        shutil.copytree(run / "checkpoints" / "step-000001", run / "checkpoints" / f"step-{step:06d}")
        (run / "checkpoints" / f"step-{step:06d}" / "trainer.json").unlink()

    def stop(report: Any) -> None:
        if report.step == 3:
            raise Crash

    listener = Listener()
    with pytest.raises(Crash):
        resume(run, ["output.keep_last=2", "evaluation.every_steps=0"], callback=stop, watcher=listener)
    damaged = [line for line in listener.said.splitlines() if "damaged" in line]
    assert len(damaged) == 2 and all(any(name in line for line in damaged) for name in ("step-000008", "step-000009"))
    assert checkpoint.latest(run / "checkpoints")[0].name == "step-000002"


def test_checkpoint_every_steps_0_writes_only_the_last_checkpoint(tmp_path: Path) -> None:
    run = run_small(tmp_path, {"output.checkpoint_every_steps": 0, "evaluation.every_steps": 0}).directory
    assert RunDirectory.open(run).checkpoint_steps() == [4]


def test_without_checkpoint_at_end_a_run_writes_what_is_due_during_it_alone(tmp_path: Path) -> None:
    options = {"output.checkpoint_at_end": False, "evaluation.every_steps": 0, "policy.warm_up.steps": 1}
    listener = Listener()
    run = run_small(tmp_path / "none", {**options, "output.checkpoint_every_steps": 0}, watcher=listener)
    assert run.exit_code == 0 and run.model_folder is None and run.accuracy is not None
    assert "written on a signal only" in listener.said
    directory = RunDirectory.open(run.directory)
    assert directory.checkpoint_steps() == []
    assert records(run.directory)[-1]["kind"] == "end"
    some = run_small(tmp_path / "some", {**options, "output.checkpoint_every_steps": 3}).directory
    assert RunDirectory.open(some).checkpoint_steps() == [3]


def test_a_checkpoint_equals_that_of_a_run_which_ends_at_its_step(straight: Path, tmp_path: Path) -> None:
    options = {"training.steps": 2, "reward.kind": EARLY, "output.rollouts_every_steps": 0}
    ended = run_small(tmp_path, options).directory
    one, other = (state(run / "checkpoints" / "step-000002") for run in (straight, ended))
    assert one["model/model.safetensors"] == other["model/model.safetensors"]
    assert one["optimizer.safetensors"] == other["optimizer.safetensors"]
    assert one["trainer.json/trainer"] == other["trainer.json/trainer"]


def test_an_error_in_an_update_completes_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written in the background is a copy of the last finished step: an update that is torn does not touch it."""
    write_share, update = checkpoint.write_share, Trainer._update

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return write_share(*arguments)

    def tear(self: Trainer, *arguments: Any, **options: Any) -> Any:
        if self.steps_done == 2:
            self.between_updates = False
            raise RuntimeError("torn")
        return update(self, *arguments, **options)

    monkeypatch.setattr(checkpoint, "write_share", write_slowly)
    monkeypatch.setattr(Trainer, "_update", tear)
    options = {"training.steps": 3, "reward.kind": EARLY, "output.save_in_background": "on"}
    with pytest.raises(RuntimeError, match="torn") as caught:
        run_small(tmp_path, {**options, "output.checkpoint_every_steps": 1})
    assert any("the state after step 2 is saved" in note for note in caught.value.__notes__), caught.value.__notes__
