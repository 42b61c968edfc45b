"""Bad problem files and output folders: exit code 2, one line with the place, and existing files stay unchanged."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from legato.core.rollout import Problem
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.tasks.task import held_out
from tests.proof.command import Command, assert_refused
from tests.proof.runs import run_small, words

GOOD = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(40)]


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def arguments_for_file(folder: Path, path: Path, options: dict[str, Any] | None = None) -> list[str]:
    """Arguments of a small run on a file of problems."""
    changes = {"task.kind": "jsonl", "task.path": str(path), "training.steps": 1, **(options or {})}
    return [word for word in words(folder / "runs", changes) if not word.startswith("task.left_digits")]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_good_file_is_trained_on(legato: Command, tmp_path: Path) -> None:
    code, _, error = legato("train", *arguments_for_file(tmp_path, write_lines(tmp_path / "good.jsonl", GOOD)))
    assert code == 0, error
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step-000001").is_dir()


BAD: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "empty": ([], ("no problems",)),
    "blank lines": (["", "  "], ("no problems",)),
    "broken on line 3": ([*GOOD[:2], '{"prompt": ', *GOOD[2:]], (":3", "bad.jsonl")),
    "an array on line 2": ([GOOD[0], "[1, 2]", *GOOD[1:]], (":2", "bad.jsonl")),
    "no prompt on line 4": ([*GOOD[:3], {"question": "1+1=", "answer": "2"}, *GOOD[3:]], (":4", "'prompt'")),
    "no answer on line 1": ([{"prompt": "1+1="}, *GOOD], (":1", "'answer'")),
    "an answer of null on line 2": ([GOOD[0], {"prompt": "1+1=", "answer": None}, *GOOD[1:]], (":2", "'answer'", "null")),
    "an empty prompt on line 1": ([{"prompt": " ", "answer": "1"}, *GOOD], (":1", "'prompt'", "empty")),
    "one problem": (GOOD[:1], ("problem",)),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_file_and_line(case: str, legato: Command, tmp_path: Path) -> None:
    rows, wanted = BAD[case]
    message = assert_refused(
        legato("train", *arguments_for_file(tmp_path, write_lines(tmp_path / "bad.jsonl", rows))),
        *(w for w in wanted if w[0] != ":"),
    )
    for place in (w for w in wanted if w[0] == ":"):
        assert place in message or f"line {place[1:]}" in message
    assert not (tmp_path / "runs").exists()


def test_a_missing_file_is_refused(legato: Command, tmp_path: Path) -> None:
    assert_refused(legato("train", *arguments_for_file(tmp_path, tmp_path / "none.jsonl")), str(tmp_path / "none.jsonl"))
    assert not (tmp_path / "runs").exists()


def test_a_binary_file_is_refused(legato: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(bytes(range(256)))
    assert_refused(legato("train", *arguments_for_file(tmp_path, tmp_path / "bad.jsonl")), "bad.jsonl")
    assert not (tmp_path / "runs").exists()


def test_a_too_long_prompt_ends_the_run_if_too_long_is_error(legato: Command, tmp_path: Path) -> None:
    rows = [*GOOD, *({"prompt": f"{number}" + "1" * 400, "answer": "1"} for number in range(400))]
    path = write_lines(tmp_path / "long.jsonl", rows)
    code, _, error = legato("train", *arguments_for_file(tmp_path, path, {"policy.too_long": "error"}))
    assert code == 2
    assert_refused((code, "", error.splitlines()[-1]), "policy.max_prompt_tokens = 16", "tokens", "policy.too_long")


def test_a_prompt_that_is_too_long_is_dropped_and_counted(tmp_path: Path) -> None:
    problems = [*GOOD, *({"prompt": f"{number}" + "1" * 400, "answer": "1"} for number in range(40))]
    run = run_small(tmp_path, {"task.left_digits": 1, "training.steps": 2}, problems=problems)
    records = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert sum(record["prompts/too_long"] for record in records if record["kind"] == "step") > 0


# Prompts of held-out problems


def test_a_held_out_prompt_that_is_too_long_does_not_enter_the_model(tmp_path: Path) -> None:
    """max_prompt_tokens also limits held-out problems: a longer prompt may not fit the context."""
    long = [{"prompt": f"{number}" + "1" * 40, "answer": "1"} for number in range(10)]
    options = {"task.held_out_share": 0.5, "training.steps": 1, "task.held_out": 50}
    run = run_small(tmp_path, options, problems=[*long, *GOOD])
    records = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    evaluated = next(record for record in records if record["kind"] == "evaluation")["eval/problems"]
    short = [problem for problem in map(_problem, GOOD) if held_out(problem, 0.5)]
    assert any(held_out(_problem(row), 0.5) for row in long)
    assert evaluated == len(short)
    dropped = sum(held_out(_problem(row), 0.5) for row in long)
    expected = (
        f"no more than {len(short) + dropped} are held out (task.held_out = 50), and {dropped} have prompts that are too"
    )
    assert any(expected in note for note in records[0]["notes"])


def _problem(row: dict[str, str]) -> Problem:
    return Problem(prompt=row["prompt"], answer=row["answer"])


# Output folders


def test_an_existing_run_is_never_overwritten(legato: Command, tmp_path: Path) -> None:
    run = run_small(tmp_path, {"training.steps": 1, "evaluation.every_steps": 0}).directory
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    message = assert_refused(legato("train", *words(tmp_path)), str(run), "never overwritten")
    assert "legato resume" in message
    assert "output.name" in message
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_an_empty_folder_of_that_name_is_refused(legato: Command, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert_refused(legato("train", *words(tmp_path)), "never overwritten")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_in_place_of_the_folder_of_runs_is_refused(legato: Command, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    assert_refused(legato("train", *words(tmp_path / "runs")), str(tmp_path / "runs"))
    assert_refused(legato("train", *words(tmp_path / "runs" / "deeper")), str(tmp_path / "runs"))
    assert (tmp_path / "runs").read_text() == "mine"


@pytest.mark.skipif(sys.platform == "win32", reason="no /proc")
def test_an_output_folder_that_is_not_writable_is_refused(legato: Command) -> None:
    """Root writes everywhere but into the kernel's own tree."""
    assert_refused(legato("train", *words(Path("/proc/legato"))), "/proc/legato")


def test_a_run_name_that_is_a_path_is_refused(legato: Command, tmp_path: Path) -> None:
    for name in ("..", "a/b", "."):
        assert_refused(legato("train", *words(tmp_path / "runs", {"output.name": name})), "output.name")
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_pauses_and_a_signal_ends_the_pause(
    legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    # The first look at the clock while the run waits sends the signal.
    monkeypatch.setattr("legato.run.room.time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    code, output, errors = legato("train", *words(tmp_path))
    assert code == 143 and errors == ""
    assert "paused: no room for a checkpoint" in output
    # Nothing was saved: no command is printed that could not work.
    assert "no checkpoint to resume from" in output and "legato resume" not in output
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


# Missing runs


@pytest.mark.parametrize("verb", ["resume", "report"])
def test_a_run_that_does_not_exist_is_refused(verb: str, legato: Command, tmp_path: Path) -> None:
    assert_refused(legato(verb, str(tmp_path / "none")), str(tmp_path / "none"), "no such folder")
    assert_refused(legato(verb, str(tmp_path)), "run directory")
    assert list(tmp_path.iterdir()) == []


_EXTRA = {"eval": (), "sample": ("2+3=",), "export": ("out",), "mismatch": ()}
"""Arguments of each command after the target."""


@pytest.fixture
def hub_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were requested from the hub; every request fails."""
    names: list[str] = []

    def refuse(name: str, **_: Any) -> None:
        names.append(name)
        raise OSError("not on the hub")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    monkeypatch.setattr("legato.policy.model.load._unreachable", lambda name: "")
    return names


@pytest.mark.parametrize("verb", _EXTRA)
def test_a_path_that_does_not_exist_is_refused_without_asking_the_hub(
    verb: str, legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_requests: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("runs/none", "./none", "../none", str(tmp_path / "none"), "~/none", "mine/none", "a/b/c"):
        assert_refused(legato(verb, name, *_EXTRA[verb]), name, "no such folder")
    assert hub_requests == [] and [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_a_hub_name_is_looked_for_on_the_hub(
    name: str, legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_requests: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(legato("eval", name), f"policy.model = {name!r} (a hub name", "not on the hub")
    assert hub_requests == [name]


def test_a_local_folder_of_an_owner_does_not_hide_other_hub_models(
    legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_requests: list[str]
) -> None:
    """`legato export RUN Qwen/mine` must not make every other model of that owner unreachable."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "mine").mkdir(parents=True)
    (tmp_path / "Qwen" / "mine" / "config.json").write_text("{}")
    assert_refused(legato("eval", "Qwen/Qwen3-0.6B"), "(a hub name", "not on the hub")
    assert hub_requests == ["Qwen/Qwen3-0.6B"]


def test_training_from_a_path_that_does_not_exist_is_refused(
    legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_requests: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(legato("train", "policy.model=runs/none"), "policy.model = 'runs/none'")
    assert hub_requests == []


def test_a_run_without_a_checkpoint_is_refused(legato: Command, tmp_path: Path) -> None:
    run = run_small(tmp_path, {"training.steps": 1, "evaluation.every_steps": 0}).directory
    shutil.rmtree(run / "checkpoints")
    for result in (legato("resume", str(run)), legato("eval", str(run)), legato("export", str(run), str(tmp_path / "out"))):
        assert_refused(result, "checkpoint")
    assert not (tmp_path / "out").exists()


def test_unknown_words_of_a_command_are_refused(legato: Command, tmp_path: Path) -> None:
    run = run_small(tmp_path, {"training.steps": 1, "evaluation.every_steps": 0}).directory
    assert_refused(legato("resume", str(run), "training.stepps=3"), "training.stepps", "did you mean 'steps'")
    assert_refused(legato("eval", str(run), "nonsense"), "nonsense")


@pytest.mark.parametrize("kind", [ZeroDivisionError, ValueError, KeyError])
def test_a_fault_of_our_own_is_exit_code_1_with_a_report_file(
    legato: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Only InputError is the user's: a plain ValueError (`zip(strict=True)` raises one) is a fault like any other."""

    def fault(*_: Any, **__: Any) -> None:
        raise kind("something broke")

    monkeypatch.setattr("legato.training.step.Trainer.step", fault)
    monkeypatch.chdir(tmp_path)
    code, out, error = legato("train", *words(tmp_path))
    assert code == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file() and kind.__name__.encode() in path.read_bytes()]
    assert error or out


def test_a_refusal_does_not_print_a_huge_value_whole(legato: Command, tmp_path: Path) -> None:
    line = assert_refused(
        legato("train", *words(tmp_path), f"training.epsilon={'a' * 100_000}"), "training.epsilon", "characters"
    )
    assert len(line) < 3000


def test_sampling_without_a_prompt_says_how_to_give_one(legato: Command, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tiny_model(TinyShape(layers=1), vocabulary=len(tokenizer), seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for typed in ("", "\n"):
        assert_refused(legato("sample", str(tmp_path), typed=typed), "expected a prompt, got an empty standard input")
    code, text, error = legato("sample", str(tmp_path), "--max-response-tokens", "2", typed="2+3=\n")
    assert code == 0 and text.startswith("2+3="), error
