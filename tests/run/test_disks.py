"""Disks that refuse: a message and exit code 2, and nothing left behind that blocks the next attempt."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from legato.records.directory import RunDirectory
from legato.records.lock import hold_lock
from legato.records.room import os_error_of
from legato.run.export import export
from legato.run.target import find
from tests.proof.command import Command, assert_refused
from tests.proof.runs import run_small

pytestmark = pytest.mark.usefixtures("lightly")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"training.steps": 1, "evaluation.every_steps": 0, "output.rollouts_every_steps": 0}
    return run_small(tmp_path_factory.mktemp("trained"), options).directory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KB: a mounted tmpfs."""
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("is_new", [True, False])
def test_an_export_to_a_full_disk_leaves_nothing_and_can_be_repeated(
    is_new: bool, trained: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk / "model" if is_new else small_disk
    assert_refused(Command(monkeypatch, capsys)("export", str(trained), str(folder)), str(folder), "the disk is full")
    assert list(small_disk.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    export(find(str(trained)), folder)
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert not list(folder.glob(".*"))


def test_an_export_that_was_killed_does_not_block_the_next_one(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / ".legato-export.partial").mkdir(parents=True)
    (tmp_path / "model" / ".legato-export.partial" / "model.safetensors").write_bytes(b"half")
    export(find(str(trained)), tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {path.name for path in (trained / "checkpoints" / "step-000001" / "model").iterdir()}


def test_a_failed_merge_leaves_nothing(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Any, folder: Path, **_: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(shutil, "copytree", fails)
    with pytest.raises(ValueError, match="the disk is full"):
        export(find(str(trained)), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_with_content_is_never_touched(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(ValueError, match="has content"):
        export(find(str(trained)), tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]


@pytest.fixture
def read_only(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """A run directory on a disk that is mounted to be read."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    commands = (["mount", "--bind", str(run), str(run)], ["mount", "-o", "remount,ro,bind", str(run)])
    done = [
        os.geteuid() == 0 and not subprocess.run(words, check=False, stderr=subprocess.DEVNULL).returncode
        for words in commands
    ]
    if all(done):
        yield run
    if done[0]:
        subprocess.run(["umount", str(run)], check=True)
    if not all(done):
        pytest.skip("only root can mount a disk to be read")


def test_a_read_only_run_is_sampled_and_exported_but_not_resumed(
    read_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(monkeypatch, capsys)
    assert_refused(command("resume", str(read_only), "training.steps=2"), str(read_only), "not writable")
    assert_refused(command("report", str(read_only)), "report.html")
    assert command("export", str(read_only), str(tmp_path / "model"))[0] == 0
    assert command("sample", str(read_only), "1+1=")[0] == 0


def test_a_lock_that_cannot_be_written_is_a_user_error(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def fails(path: Any, *arguments: Any, **keywords: Any) -> int:
        if str(path).endswith(".lock"):
            raise OSError(errno.EROFS, "Read-only file system")
        return open_file(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", fails)
    with (
        pytest.raises(ValueError, match=r"cannot lock .*\.lock: the folder is not writable"),
        hold_lock(RunDirectory(trained)),
    ):
        pass


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EIO, "Input/output error"), errno.EIO),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]), errno.ENOSPC),
        (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), errno.EDQUOT),
        (RuntimeError("a fault of ours"), None),
    ],
)
def test_errors_of_the_operating_system_are_recognised_in_other_errors(error: Exception, number: int | None) -> None:
    cause = os_error_of(error)
    assert (None if cause is None else cause.errno) == number


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/data/out.json"), 2),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/ours"), 1),
        (PermissionError(errno.EPERM, "Operation not permitted"), 1),
    ],
)
def test_errors_of_the_disk_are_not_faults_of_ours(
    error: Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("legato.cli.explain.explain_one", fails)
    result = Command(monkeypatch, capsys)("explain", "gspo")
    assert result[0] == code
    if code == 2:
        assert_refused(result, "cannot read or write")
        assert list(tmp_path.iterdir()) == []
