"""TensorBoard and W&B: an error before training if they cannot start, switched off if they fail later."""

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from legato.run.loggers import Logger, TensorBoardLogger, TrackioLogger, WandbLogger, scalars

METRICS = {
    "reward/mean": 0.5,
    "clip/sequences@0": 0.25,
    "nan": math.nan,
    "none": None,
    "word": "x",
    "flag": True,
    "updates": 4,
}


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = 0
        self.fails = False
        self.id = "1a2b"
        self.tables: list[tuple[dict[str, Any], int]] = []

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axis = (name, step_metric)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.fails:
            raise ConnectionError("gone")
        if "completions" in metrics:
            self.tables.append((metrics["completions"], step if step is not None else metrics["step"]))
            return
        metrics = metrics if step is None else {**metrics, "step": step}
        self.logged.append(({key: value for key, value in metrics.items() if key != "step"}, int(metrics["step"])))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(run=FakeRun(), arguments={}, refuses=False)

    def init(**arguments: Any) -> FakeRun:
        if fake.refuses:
            raise RuntimeError("api_key not configured")
        fake.arguments = arguments
        return fake.run

    for name in ("wandb", "trackio"):
        module = ModuleType(name)
        module.init, module.Table = init, dict  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def wandb_logger(folder: Path, messages: list[str]) -> Logger:
    return WandbLogger(
        project="p", name="n", tags=("a", "b"), config={"training": {"lr": 1e-3}}, folder=folder, say=messages.append
    )


def trackio_logger(folder: Path, messages: list[str]) -> Logger:
    return TrackioLogger(project="p", name="n", config={"training": {"lr": 1e-3}}, folder=folder, say=messages.append)


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


def test_only_finite_numbers_are_logged() -> None:
    assert scalars(METRICS) == {"reward/mean": 0.5, "clip/sequences@0": 0.25, "updates": 4.0}


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    messages: list[str] = []
    logger = TensorBoardLogger(tmp_path / "events", say=messages.append)
    logger.log(1, METRICS)
    logger.log(2, METRICS)
    logger.close()
    logged = scalars_of(tmp_path / "events")
    assert logged == {key: [(1, value), (2, value)] for key, value in scalars(METRICS).items()}
    assert messages == []


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    for first, value in ((0, 1.0), (2, 5.0)):
        logger = TensorBoardLogger(tmp_path, say=print, first_step=first)
        for step in range(max(1, first), 4):
            logger.log(step, {"reward/mean": value})
        logger.close()
    assert scalars_of(tmp_path)["reward/mean"] == [(1, 1.0), (2, 5.0), (3, 5.0)]


def test_a_run_that_goes_back_replaces_the_steps_it_gave_up(tmp_path: Path) -> None:
    """A recovery of the health watch goes back; an evaluation is logged at the preceding step."""
    logger = TensorBoardLogger(tmp_path, say=print)
    for step, value in ((1, 1.0), (2, 1.0), (3, 1.0), (2, 5.0)):
        logger.log(step, {"reward/mean": value})
        logger.log(step, {"eval/accuracy_sampled": value})
    logger.close()
    logged = scalars_of(tmp_path)
    assert logged["reward/mean"] == logged["eval/accuracy_sampled"] == [(1, 1.0), (2, 5.0)]


@pytest.mark.parametrize("missing", ["torch.utils.tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_an_error_with_the_install_command(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    extra = missing.rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"pip install 'legato\[{extra}\]'"):
        if extra == "wandb":
            wandb_logger(tmp_path, [])
        elif extra == "trackio":
            trackio_logger(tmp_path, [])
        else:
            TensorBoardLogger(tmp_path, say=print)


def test_a_tensorboard_folder_that_is_not_writable_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"TensorBoard.*{tmp_path}/file/events"):
        TensorBoardLogger(tmp_path / "file" / "events", say=print)


def test_wandb_gets_project_name_tags_config_and_numbers(tmp_path: Path, service: SimpleNamespace) -> None:
    messages: list[str] = []
    logger = wandb_logger(tmp_path, messages)
    logger.log(3, METRICS)
    logger.close()
    assert service.arguments == {
        "project": "p",
        "name": "n",
        "tags": ["a", "b"],
        "config": {"training": {"lr": 1e-3}},
        "dir": str(tmp_path),
    }
    assert service.run.logged == [(scalars(METRICS), 3)] and service.run.axis == ("*", "step")
    assert service.run.finished == 1
    assert messages == []


def test_wandb_that_does_not_start_is_an_error_before_training(tmp_path: Path, service: SimpleNamespace) -> None:
    service.refuses = True
    with pytest.raises(ValueError, match=r"W&B.*api_key not configured.*wandb login"):
        wandb_logger(tmp_path, [])


def test_a_failure_is_reported_once_and_switches_the_logger_off(tmp_path: Path, service: SimpleNamespace) -> None:
    messages: list[str] = []
    logger = wandb_logger(tmp_path, messages)
    logger.log(1, METRICS)
    service.run.fails = True
    logger.log(2, METRICS)
    service.run.fails = False
    logger.log(3, METRICS)
    logger.close()
    assert len(messages) == 1
    assert "W&B" in messages[0] and "switched off" in messages[0]
    assert "ConnectionError: gone" in messages[0]
    assert [step for _, step in service.run.logged] == [1]


def test_trackio_gets_project_config_and_numbers(tmp_path: Path, service: SimpleNamespace) -> None:
    messages: list[str] = []
    logger = trackio_logger(tmp_path, messages)
    logger.log(3, METRICS)
    logger.close()
    name = service.arguments.pop("name")
    assert name.startswith("n-") and len(name) > 2
    assert service.arguments == {"project": "p", "config": {"training": {"lr": 1e-3}}, "resume": "allow"}
    assert service.run.logged == [(scalars(METRICS), 3)] and service.run.finished == 1
    assert messages == []


def test_a_resumed_run_goes_on_as_the_same_run(tmp_path: Path, service: SimpleNamespace) -> None:
    trackio_logger(tmp_path, [])
    name = service.arguments["name"]
    wandb_logger(tmp_path, [])
    assert "id" not in service.arguments and "resume" not in service.arguments
    wandb_logger(tmp_path, [])
    assert (service.arguments["id"], service.arguments["resume"]) == ("1a2b", "allow")
    trackio_logger(tmp_path, [])
    assert service.arguments["name"] == name
    (tmp_path / "tracker.json").write_text("torn {")
    wandb_logger(tmp_path, [])
    assert "id" not in service.arguments


@pytest.mark.parametrize("make", [wandb_logger, trackio_logger])
def test_completions_become_a_table(make: Any, tmp_path: Path, service: SimpleNamespace) -> None:
    logger = make(tmp_path, [])
    rollout = {
        "prompt": "1+1=",
        "text": "2" * 5000,
        "answer": "2",
        "reward": 1.0,
        "accuracy": 1.0,
        "tokens": 3,
        "stop": "end",
    }
    logger.log_completions(4, [rollout] * 40)
    ((table, step),) = service.run.tables
    assert step == 4 and len(table["data"]) == 32
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (row["step"], row["prompt"], row["answer"], row["reward"], row["advantage"]) == (4, "1+1=", "2", 1.0, None)
    assert len(row["response"]) == 4000
