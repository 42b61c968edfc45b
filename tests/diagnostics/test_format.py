"""The run directory keeps its records through crashes and full disks."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from legato.records.directory import FORMAT, RunDirectory
from legato.records.lines import RunDirectoryError


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "runs", "first")
    directory.write_config('[training]\nname = "x"\n')
    directory.append_metrics({"kind": "start"})
    return directory


def test_run_records_need_only_the_standard_library() -> None:
    names = ("torch", "numpy", "rich")
    code = f"import sys, legato.records.directory; sys.exit(any(name in sys.modules for name in {names}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_existing_run_is_never_overwritten_and_resume_is_suggested(directory: RunDirectory) -> None:
    before = directory.metrics_path.read_bytes()
    with pytest.raises(ValueError, match=rf"legato resume {directory.path}.*output\.name="):
        RunDirectory.create(directory.path.parent, "first")
    assert directory.metrics_path.read_bytes() == before


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0b"])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        RunDirectory.create(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match=rf"{tmp_path}/runs/first.*file"):
        RunDirectory.create(tmp_path / "runs", "first")


def test_a_parent_that_is_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"not writable .*output\.directory"):
        RunDirectory.create(tmp_path, "first")


def test_opening_names_the_missing_files_and_the_format(tmp_path: Path, directory: RunDirectory) -> None:
    assert RunDirectory.open(directory.path) == directory
    with pytest.raises(ValueError, match="no such folder"):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.toml and metrics\.jsonl missing"):
        RunDirectory.open(tmp_path)
    directory.environment_path.write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(ValueError, match=rf"format {FORMAT}, got format {FORMAT + 1}"):
        RunDirectory.open(directory.path)


def test_records_round_trip_and_non_finite_values_become_null(directory: RunDirectory) -> None:
    directory.append_metrics({"kind": "step", "a/b": 0.1, "nan": math.nan, "deep": {"list": [1.0, -math.inf]}}, sync=True)
    assert directory.metrics()[1:] == [{"kind": "step", "a/b": 0.1, "nan": None, "deep": {"list": [1.0, None]}}]
    assert "NaN" not in directory.metrics_path.read_text()


@pytest.mark.parametrize("torn", [b'{"kind":"st', b'{"kind":"step"}', b"\0\0\0\0", b'{"kind"\n', b"\n"])
def test_a_torn_last_line_is_ignored_and_does_not_corrupt_the_next(directory: RunDirectory, torn: bytes) -> None:
    whole = directory.metrics_file.position()
    with directory.metrics_path.open("ab") as file:
        file.write(torn)
    assert directory.metrics() == [{"kind": "start"}]
    assert directory.metrics_file.position() == whole
    if not torn.endswith(b"\n"):
        directory.append_metrics({"kind": "step"})
        assert directory.metrics() == [{"kind": "start"}, {"kind": "step"}]
    directory.metrics_file.truncate(whole)
    assert directory.metrics_path.stat().st_size == whole


@pytest.mark.parametrize("tail", [b'{"kind":"step"}\n', b'{"kind":"step"}\n{"kind":"st', b'{"kind":"st'])
def test_a_torn_line_in_the_middle_is_an_error_with_its_line_number(directory: RunDirectory, tail: bytes) -> None:
    with directory.metrics_path.open("ab") as file:
        file.write(b'{"kind":"st\n' + tail)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2"):
        directory.metrics()


def test_a_line_that_is_not_an_object_is_an_error(directory: RunDirectory) -> None:
    with directory.metrics_path.open("ab") as file:
        file.write(b'3\n{"kind":"step"}\n')
    with pytest.raises(RunDirectoryError, match=r"line 2.*'3'"):
        directory.metrics()


def test_truncating_to_a_position_drops_later_lines(directory: RunDirectory) -> None:
    directory.append_metrics({"kind": "step", "step": 1})
    position = directory.metrics_file.position()
    assert position == directory.metrics_path.stat().st_size
    directory.append_metrics({"kind": "step", "step": 2})
    directory.metrics_file.truncate(position)
    assert [record.get("step") for record in directory.metrics()] == [None, 1]
    for wrong, message in ((position + 1, "0 to"), (-1, "0 to"), (position - 3, "inside a line")):
        with pytest.raises(ValueError, match=message):
            directory.metrics_file.truncate(wrong)
    directory.metrics_file.truncate(0)
    assert directory.metrics() == []


def test_a_full_disk_is_an_error_and_loses_no_earlier_line(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_disk_full)
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl.*disk is full") as caught:
            directory.append_metrics({"kind": "step"}, sync=True)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OSError)
    directory.append_metrics({"kind": "end"})
    assert directory.metrics()[0] == {"kind": "start"}
    assert directory.metrics()[-1] == {"kind": "end"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_truly_full_device_is_an_error(directory: RunDirectory) -> None:
    directory.metrics_path.unlink()
    directory.metrics_path.symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match="disk is full"):
        directory.append_metrics({"kind": "step"})


def test_rollouts_round_trip_and_files_are_byte_identical(directory: RunDirectory) -> None:
    records = [
        {"prompt": "1+1=", "text": "\u202e\x1b[2J\ud800 <b>\n2", "answer": None, "reward": 1.0},
        {"prompt": "2", "text": ""},
    ]
    path = directory.write_rollouts(120, records)
    assert path == directory.path / "rollouts" / "step-000120.jsonl.gz"
    assert directory.read_rollouts(120) == records
    first = path.read_bytes()
    assert first[4:8] == bytes(4)  # gzip would put the time here
    directory.write_rollouts(120, records)
    assert path.read_bytes() == first
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_rollouts_that_fail_while_written_leave_no_file(directory: RunDirectory) -> None:
    def broken() -> Any:
        yield {"prompt": "1"}
        raise KeyError("reward")

    with pytest.raises(KeyError):
        directory.write_rollouts(3, broken())
    assert directory.rollout_steps() == []
    assert list((directory.path / "rollouts").glob("*")) == []


def test_steps_are_found_by_name_only(directory: RunDirectory) -> None:
    for step in (1_000_000, 20, 3):
        directory.write_rollouts(step, [])
        directory.checkpoint_path(step).mkdir(parents=True)
    (directory.path / "rollouts" / ".step-000004.jsonl.gz.partial").write_text("")
    (directory.path / "checkpoints" / "step-000005.partial").mkdir()
    (directory.path / "checkpoints" / "step-000006").write_text("a file")
    assert directory.rollout_steps() == directory.checkpoint_steps() == [3, 20, 1_000_000]
    with pytest.raises(ValueError, match="3, 20, 1000000"):
        directory.read_rollouts(7)


def test_damaged_rollouts_are_an_error_with_the_file_name(directory: RunDirectory) -> None:
    path = directory.write_rollouts(1, [{"text": str(index)} for index in range(1000)])
    data = path.read_bytes()
    for broken in (data[: len(data) // 2], b"not gzip", data[:20] + b"\xff" * 20 + data[40:]):
        path.write_bytes(broken)
        with pytest.raises(RunDirectoryError, match=r"step-000001\.jsonl\.gz"):
            directory.read_rollouts(1)


def test_the_environment_file_holds_versions_and_seeds_but_no_environment_variables(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-canary")
    directory.write_environment({"seeds": {"training": 3}, "hardware": {"devices": ["H200"]}})
    environment = directory.environment()
    assert environment["format"] == FORMAT
    assert environment["seeds"] == {"training": 3}
    assert environment["hardware"]["devices"] == ["H200"]
    assert environment["hardware"]["cores"] == os.cpu_count()
    assert "torch" in environment["packages"]
    assert "pytest" not in environment["packages"]
    text = directory.environment_path.read_text()
    assert "hunter2" not in text
    assert os.environ["PATH"] not in text
