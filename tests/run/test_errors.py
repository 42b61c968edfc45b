"""Errors in the middle of a run: the last finished step is saved, and the advice names a checkpoint that exists."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.errors import InputError
from legato.records.directory import RunDirectory
from legato.run.train import resume
from legato.training.collect import Collector
from legato.training.optimizer import Optimizer
from tests.proof import verdicts
from tests.proof.runs import differences, outcome, run_small

pytestmark = pytest.mark.usefixtures("lightly")

OPTIONS = {
    "reward.kind": f"{verdicts.__file__}:early",
    "training.steps": 3,
    "evaluation.every_steps": 0,
    "output.checkpoint_every_steps": 0,
    "output.rollouts_every_steps": 0,
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("straight"), OPTIONS).directory


def fail_at_call(patch: pytest.MonkeyPatch, owner: type, name: str, call: int, error: Exception) -> None:
    """Let the method `name` do its work and then raise at its call number `call`, counted from 1."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def count_and_fail(self: Any, *rest: Any, **more: Any) -> Any:
        calls[0] += 1
        result = original(self, *rest, **more)
        if calls[0] == call:
            raise error
        return result

    patch.setattr(owner, name, count_and_fail)


def notes_of(raised: pytest.ExceptionInfo[BaseException]) -> str:
    return "; ".join(getattr(raised.value, "__notes__", ()))


@pytest.mark.parametrize("error", [InputError("a prompt of 300 tokens is too long"), RuntimeError("CUDA out of memory")])
def test_an_error_while_sampling_saves_the_step_before(
    error: Exception, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The problems of the failed step were drawn already; the resumed run draws the same ones again."""
    fail_at_call(monkeypatch, Collector, "next", 3, error)
    with pytest.raises(type(error), match=str(error)) as raised:
        run_small(tmp_path, OPTIONS)
    run = tmp_path / "run"
    assert notes_of(raised) == f"the state after step 2 is saved: resume with legato resume {run}"
    assert RunDirectory.open(run).metrics()[-1]["reason"] == f"stopped by an error: {error}"
    monkeypatch.undo()
    assert resume(run).exit_code == 0
    assert differences(outcome(straight, checkpoints=False), outcome(run, checkpoints=False)) == []


def test_an_error_after_a_step_saves_that_step(straight: Path, tmp_path: Path) -> None:
    def fail(report: Any) -> None:
        if report.step == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError) as raised:
        run_small(tmp_path, OPTIONS, callback=fail)
    assert "the state after step 2 is saved" in notes_of(raised)
    resume(tmp_path / "run")
    assert differences(outcome(straight, checkpoints=False), outcome(tmp_path / "run", checkpoints=False)) == []


def test_a_torn_update_is_not_saved(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes after the first of two updates of step 2: these weights belong to no step."""
    fail_at_call(monkeypatch, Optimizer, "step", 3, RuntimeError("lost"))
    with pytest.raises(RuntimeError) as raised:
        run_small(tmp_path, {**OPTIONS, "output.name": "run"})
    run = tmp_path / "run"
    assert "step 1 is not saved" in notes_of(raised) and "no checkpoint to resume from" in notes_of(raised)
    assert f"legato train {run}/config.toml output.name=run-2" in notes_of(raised)
    assert RunDirectory.open(run).checkpoint_steps() == []


def test_an_error_before_the_first_step_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_call(monkeypatch, Collector, "next", 1, InputError("too long"))
    with pytest.raises(InputError) as raised:
        run_small(tmp_path, OPTIONS)
    assert notes_of(raised).startswith("there is no checkpoint to resume from; begin again with legato train")
    assert "legato resume" not in notes_of(raised)


def test_a_warm_up_is_saved_although_no_step_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_call(monkeypatch, Collector, "next", 1, InputError("too long"))
    with pytest.raises(InputError, match="too long") as raised:
        run_small(tmp_path, {**OPTIONS, "policy.warm_up.steps": 1})
    assert "the state after step 0 is saved" in notes_of(raised)


def test_a_save_that_fails_too_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_call(monkeypatch, Collector, "next", 2, InputError("the first error"))

    def refuse(*_: Any) -> None:
        raise InputError("the checkpoint could not be written")

    monkeypatch.setattr("legato.training.checkpoint.write", refuse)
    with pytest.raises(InputError, match="the first error") as raised:
        run_small(tmp_path, OPTIONS)
    assert notes_of(raised).startswith(
        "the state after step 1 is not saved: the checkpoint could not be written; there is no"
    )


def test_a_save_that_fails_after_memory_ran_out_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_call(monkeypatch, Collector, "next", 2, torch.OutOfMemoryError("CUDA out of memory"))

    def refuse(*_: Any) -> None:
        raise InputError("no room for a checkpoint")

    monkeypatch.setattr("legato.training.checkpoint.write", refuse)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run_small(tmp_path, OPTIONS)
    assert notes_of(raised).startswith("the state after step 1 is not saved: no room for a checkpoint; there is no")


def test_a_run_given_in_python_is_resumed_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {path: value for path, value in OPTIONS.items() if path != "reward.kind"}
    fail_at_call(monkeypatch, Collector, "next", 2, InputError("too long"))
    with pytest.raises(InputError) as raised:
        run_small(tmp_path, options, reward=verdicts.early)
    assert notes_of(raised) == "the state after step 1 is saved: resume from Python with the same reward"


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from legato.records.lines import RunDirectoryError

    def refuse(directory: Any) -> None:
        raise RunDirectoryError("cannot write report.html: the disk is full")

    monkeypatch.setattr("legato.run.train.write_report", refuse)
    run = run_small(tmp_path, {**OPTIONS, "training.steps": 1})
    assert run.exit_code == 0 and "report.html" in run.reason
