"""Printing never ends a run: readers that leave, full disks, closed descriptors, watchers that raise."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from legato.cli.output import SafeStream
from legato.compare.compare import GuardedSay
from legato.records.directory import RunDirectory
from legato.records.lines import Lines
from legato.run.display import PlainDisplay
from legato.run.train import resume
from legato.run.watcher import GuardedWatcher, lost_output
from tests.proof.command import Command, assert_refused, load_unchecked
from tests.proof.runs import Listener, run_small, words

pytestmark = pytest.mark.usefixtures("lightly")

OPTIONS = {"training.steps": 2, "evaluation.every_steps": 0, "output.checkpoint_every_steps": 0}


@pytest.fixture
def abandoned() -> Iterator[int]:
    """The write end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full() -> Iterator[int]:
    """A descriptor of a disk without room."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def notes(run: Path) -> list[str]:
    return [record["text"] for record in RunDirectory.open(run).metrics() if record["kind"] == "note"]


@pytest.mark.parametrize("kind", ["abandoned", "full"])
def test_a_lost_log_is_noted_once_and_the_run_goes_on(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    stream = SafeStream(request.getfixturevalue(kind), "utf-8")
    run = run_small(tmp_path, OPTIONS, watcher=PlainDisplay(stream))
    assert run.exit_code == 0 and run.reason == "all steps done"
    assert [note for note in notes(run.directory) if "printing stopped" in note] == [
        f"printing stopped and the run went on without it ({type(stream.lost).__name__}: {stream.lost})"
    ]
    assert resume(run.directory, ["training.steps=3"], watcher=PlainDisplay(stream)).exit_code == 0
    assert len([note for note in notes(run.directory) if "printing stopped" in note]) == 2


def test_a_watcher_that_raises_is_not_called_again(tmp_path: Path) -> None:
    class Broken(Listener):
        def step(self, step: int, *rest: Any, **more: Any) -> None:
            super().step(step, *rest, **more)
            raise ValueError("I/O operation on closed file")

    watcher = Broken()
    assert run_small(tmp_path, OPTIONS, watcher=watcher).exit_code == 0
    assert watcher.steps == [1] and watcher.closed == 1
    assert any("closed file" in note for note in notes(tmp_path / "run"))


def test_a_message_of_a_signal_handler_waits_for_the_line_that_is_being_printed() -> None:
    lines: list[str] = []

    class Slow(Listener):
        def step(self, step: int, *rest: Any, **more: Any) -> None:
            guarded.message("signal")
            lines.append("step")

        def message(self, text: str) -> None:
            lines.append(text)

    guarded = GuardedWatcher(Slow())
    guarded.step(1, 2, {}, None, None)
    assert lines == ["step", "signal"]


def test_a_stream_without_a_reader_sends_what_others_write_to_the_null_device(abandoned: int) -> None:
    stream = SafeStream(abandoned, "ascii")
    stream.write("é")
    stream.close()
    assert isinstance(stream.lost, BrokenPipeError) and lost_output(stream) is stream.lost
    print("closing closes nothing", file=stream, flush=True)
    assert os.write(abandoned, b"x") == 1


def test_a_comparison_whose_output_is_lost_notes_it_once(tmp_path: Path) -> None:
    def say(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    guarded = GuardedSay(say, tmp_path / "comparison")
    guarded("before the folder is there")
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "definition.json").touch()
    guarded("one")
    guarded("two")
    assert [record["kind"] for record in Lines(tmp_path / "comparison" / "notes.jsonl").read()] == ["note"]


def test_a_closed_descriptor_is_not_given_to_the_next_file(tmp_path: Path) -> None:
    """Without a standard output the next file would get its number, and what is printed would be written into it."""
    code = f"""
from legato.cli.output import safe_output
import os, sys
with safe_output():
    with open({str(tmp_path / "file")!r}, "w") as file:
        print("printed", flush=True)
        os.write(1, b"written")
    assert sys.stdout.lost is not None
"""
    ended = subprocess.run(["bash", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code], check=False, timeout=60)
    assert ended.returncode == 0 and (tmp_path / "file").read_bytes() == b""


def test_train_into_a_pipe_that_closes_ends_with_0(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "legato.cli.main", "train", *words(tmp_path, OPTIONS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 0, errors
    assert "Traceback" not in errors and "Exception ignored" not in errors
    assert any("Broken pipe" in note for note in notes(tmp_path / "run"))


@pytest.mark.parametrize(("verb", "code"), [("explain", 2), ("train", 0)])
def test_a_full_standard_output_is_an_error_where_printing_is_the_purpose(
    verb: str, code: int, full: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = load_unchecked("cli/main.py")
    before = signal.getsignal(signal.SIGINT)
    stream = SafeStream(full, "utf-8")

    def app() -> None:
        print("a table")
        raise SystemExit(0)

    monkeypatch.setattr(main, "app", app)
    monkeypatch.setattr(sys, "argv", ["legato", verb])
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as ending:
        main.main()
    signal.signal(signal.SIGINT, before)
    assert ending.value.code == code
    assert ("No space left" in capsys.readouterr().err) == (code == 2)


def test_a_broken_pipe_within_a_verb_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer takes every BrokenPipeError for that of the standard output, and ends without a word."""

    def fails(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("legato.cli.explain.explain_one", fails)
    monkeypatch.setattr(sys, "argv", ["legato", "explain", "gspo"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ending:
        load_unchecked("cli/main.py").main()
    signal.signal(signal.SIGINT, before)
    assert ending.value.code == 1 and "Broken pipe" in capsys.readouterr().err


# Encodings


def test_a_locale_that_is_not_utf8_starts_python_again_in_its_utf8_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    main = load_unchecked("cli/main.py")
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.setattr(main, "run_command", lambda: None)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "legato.cli.main", "sample", "run", "1+\udcc3\udca9"])
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    main.main()
    assert started == []
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    main.main()
    main.main()
    assert started == [[sys.executable, "-m", "legato.cli.main", "sample", "run", "1+\udcc3\udca9"]], (
        "once, or it never ends"
    )
    assert os.environ["PYTHONUTF8"] == "1"


def test_a_prompt_that_is_not_utf8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_small(tmp_path, {**OPTIONS, "training.steps": 1}).directory
    command = Command(monkeypatch, capsys)
    assert_refused(command("sample", str(run), "1+\udcff"), "UTF-8", "1+\\udcff")
    assert command("sample", str(run), typed="1+é\n")[0] == 0
