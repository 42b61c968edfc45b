"""Recoveries and stops when something else fails too: kills, broken states, checkpoints that must not be lost."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.health import recovery, watch
from legato.health.actions import Health
from legato.health.evidence import Evidence
from legato.records.directory import RunDirectory
from legato.run import execute
from legato.run.train import resume
from legato.run.wire import PythonObjects
from legato.training.report import StepReport
from legato.training.step import Trainer
from tests.proof.runs import cut_run, differences, light, outcome, state
from tests.run.test_health import ILL, RECOVER, early, of_kind, record_state_before_recovery, run
from tests.run.test_signals import send_signals_at


@pytest.fixture(scope="module", autouse=True)
def one_rule() -> Iterator[None]:
    with light(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch.Watch.__init__, "__defaults__", ((ILL,),))
        yield


OBJECTS = PythonObjects(reward=early)
RECOVERING = ["health.action=recover", "health.lr_factor=0.25"]


class Kill(BaseException):
    """Stands for a killed process: nothing catches this."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a recovery to the only checkpoint that is left."""
    return Path(run(tmp_path_factory.mktemp("straight"), {**RECOVER, "output.keep_last": 1}).directory)


def before(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def place(patch: pytest.MonkeyPatch) -> None:
        def die(*_: Any, **__: Any) -> None:
            raise Kill

        patch.setattr(owner, name, die)

    return place


def kill_between_the_renames(patch: pytest.MonkeyPatch) -> None:
    """Die after the old checkpoint lost its name and before the new one has it."""
    rename = Path.rename

    def rename_or_die(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial") and (path.parent / f".{target.name}.before.partial").exists():
            raise Kill
        return rename(path, target)

    patch.setattr(Path, "rename", rename_or_die)


KILLS = {
    "after the metrics": before(recovery, "restore"),
    "before it is saved": before(execute.Execution, "save_again"),
    "between the renames": kill_between_the_renames,
}


@pytest.mark.parametrize("place", KILLS)
def test_a_run_killed_during_a_recovery_ends_like_an_unkilled_run(
    place: str, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        KILLS[place](patch)
        with pytest.raises(Kill):
            run(tmp_path, {**RECOVER, "output.keep_last": 1})
    if place == "between the renames":
        with pytest.raises(ValueError, match="no whole checkpoint"):
            # Readers (sample, export) ignore checkpoints that the run is about to rename.
            recovery.checkpoint.latest(tmp_path / "run" / "checkpoints")
    resume(tmp_path / "run", objects=OBJECTS)
    assert differences(outcome(straight), outcome(tmp_path / "run")) == []
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_recovery_to_step_0_starts_with_fresh_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint has no moments; the moments of the failed run are dropped."""
    states = record_state_before_recovery(monkeypatch)
    ended = run(tmp_path, {**RECOVER, "output.checkpoint_every_steps": 100, "output.keep_last": 100})
    assert of_kind(ended.directory, "recovery")[0]["step"] == 0
    after = state(ended.directory / "checkpoints" / "step-000000")
    for name in ("optimizer.safetensors", "model/model.safetensors", "random.safetensors"):
        assert after[name] == states["before"][name], name


def test_the_best_checkpoint_survives_a_recovery_to_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {0: 0.1, 4: 0.9}
    monkeypatch.setattr(
        execute,
        "accuracy_metrics",
        lambda kind, answers: {f"eval/accuracy_{kind}": scores.get(trainers[-1].steps_done, 0.2)},
    )
    trainers: list[Trainer] = []
    initialize = Trainer.__init__

    def record_trainer(trainer: Trainer, **parts: Any) -> None:
        trainers.append(trainer)
        initialize(trainer, **parts)

    monkeypatch.setattr(Trainer, "__init__", record_trainer)
    ended = run(tmp_path, {**RECOVER, "evaluation.every_steps": 2})
    (entry,) = of_kind(ended.directory, "recovery")
    assert entry["step"] == 1 and entry["best"] == "checkpoints/given-up-step-000004"
    assert (ended.directory / entry["best"] / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("action", ["stop", "pause"])
def test_a_checkpoint_saved_at_an_alarm_does_not_push_out_healthy_ones(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(execute.Health, "pause", lambda health, *_: steps.extend(health.directory.checkpoint_steps()))
    ended = run(tmp_path, {"health.action": action, "output.keep_last": 1})
    steps = steps or RunDirectory.open(ended.directory).checkpoint_steps()
    assert steps[-1] == 7 and steps[0] <= 2


@pytest.mark.parametrize("action", ["stop", "pause"])
def test_a_state_that_cannot_be_saved_keeps_the_exit_code(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def step_then_poison(trainer: Trainer, *rest: Any) -> Any:
        report = step(trainer, *rest)
        if report.step == 7:
            next(iter(trainer.policy.parameters().values())).data.view(-1)[0] = torch.nan
        return report

    monkeypatch.setattr(Trainer, "step", step_then_poison)
    ended = run(tmp_path, {"health.action": action})
    assert ended.exit_code == 3 and "not finite" in ended.reason and "the state is saved" not in ended.reason
    assert of_kind(ended.directory, "end")[-1]["step"] == 7
    assert RunDirectory.open(ended.directory).checkpoint_steps()[-1] == 6


def test_the_evidence_of_a_resumed_run_has_the_steps_before_it(tmp_path: Path) -> None:
    ended = run(tmp_path / "straight", {})
    again = cut_run(ended.directory, tmp_path, 5)
    resume(again, objects=OBJECTS)
    files = [folder / "evidence" / "step-000007" / "metrics.jsonl" for folder in (ended.directory, again)]
    steps = [[json.loads(line)["step"] for line in file.read_text().splitlines()] for file in files]
    assert steps[0] == steps[1] == [1, 2, 3, 4, 5, 6, 7]


def test_evidence_is_valid_json_and_its_tensors_move_to_the_cpu(tmp_path: Path) -> None:
    """JSON has no NaN, although alarms are often about NaN. Tensors of past steps must not stay on the device."""

    moved: list[bool] = []

    class OnDevice(torch.Tensor):
        def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
            moved.append(True)
            return torch.zeros(2)

    directory = RunDirectory.create(tmp_path, "run")
    directory.append_metrics({"kind": "step", "step": 1, "loss/total": float("nan")})
    evidence = Evidence(directory, 2)
    tensors = {"rewards": torch.zeros(2).as_subclass(OnDevice)}
    metrics = {"loss/total": float("nan")}
    evidence.hold(StepReport(step=1, metrics=metrics, groups=(), floor=None, unscorable={}, tensors=tensors))
    assert moved
    folder = evidence.write(directory.evidence_path(1), [])
    assert folder is not None
    text = (folder / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss/total"] is None


def test_a_rule_that_holds_may_be_ignored_from_a_resume_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of an ignored rule in the checkpoint does not break the next save."""
    rule = replace(ILL, name="drift")
    monkeypatch.setattr(watch.Watch.__init__, "__defaults__", ((rule,),))
    ended = run(tmp_path, {})
    assert of_kind(ended.directory, "finding")
    words = ["health.action=recover", "health.ignored=['drift']", "training.steps=11"]
    assert resume(ended.directory, words, objects=OBJECTS).exit_code == 0


def test_a_recovery_never_goes_back_to_a_checkpoint_in_alarm(tmp_path: Path) -> None:
    """A run that only printed the alarm and is resumed with recoveries must not spend them on checkpoints in alarm."""
    ended = run(tmp_path, {"output.keep_last": 2, "training.steps": 12})
    assert RunDirectory.open(ended.directory).checkpoint_steps() == [11, 12]
    again = resume(ended.directory, ["training.steps=15", *RECOVERING], objects=OBJECTS, allow_changes=True)
    assert again.exit_code == 3 and "no whole checkpoint" in again.reason
    assert of_kind(ended.directory, "recovery") == []
    assert [(each["since"], each["step"]) for each in of_kind(ended.directory, "finding")] == [(6, 7), (6, 13)]


def test_a_run_resumed_after_an_alarm_goes_back_to_before_the_first_sign(tmp_path: Path) -> None:
    ended = run(tmp_path, {"training.steps": 12})
    again = resume(ended.directory, ["training.steps=15", *RECOVERING], objects=OBJECTS, allow_changes=True)
    assert again.exit_code == 0
    (recovered,) = of_kind(ended.directory, "recovery")
    assert (recovered["from"], recovered["step"]) == (13, 1)


@pytest.mark.parametrize("answered", [True, False])
def test_an_answered_pause_is_not_repeated_after_a_resume(
    answered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run that is restarted by a machine would wait again for a person who already answered."""
    paused: list[int] = []

    def pause(health: Health, *_: Any) -> None:
        paused.append(health.watch.last)
        if not answered:
            raise Kill
        health.answered |= health.watch.alarms()

    monkeypatch.setattr(execute.Health, "pause", pause)
    if answered:
        folder = run(tmp_path, {"health.action": "pause"}, callback=send_signals_at(8, signal.SIGINT)).directory
    else:
        with pytest.raises(Kill):
            run(tmp_path, {"health.action": "pause"})
        folder = tmp_path / "run"
    assert paused == [7]
    if answered:
        assert resume(folder, objects=OBJECTS).exit_code == 0 and paused == [7]
    else:
        with pytest.raises(Kill):
            resume(folder, objects=OBJECTS)
        assert paused == [7, 8]
