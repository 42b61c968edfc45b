"""Whole runs of the smallest kind, and the contents of runs in a form that can be compared."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.records.directory import RunDirectory
from legato.run.train import Run, train

SMALL: dict[str, Any] = {
    "policy.tiny.hidden": 32,
    "policy.tiny.layers": 1,
    "policy.tiny.heads": 2,
    "policy.max_prompt_tokens": 16,
    "task.left_digits": 1,
    "task.held_out": 4,
    "rollouts.samples_per_prompt": 4,
    "rollouts.max_response_tokens": 3,
    "training.prompts_per_step": 4,
    "training.updates_per_step": 2,
    "training.lr": 3e-3,
    "training.steps": 4,
    "evaluation.every_steps": 2,
    "output.checkpoint_every_steps": 1,
    "output.keep_last": 100,
    "output.rollouts_every_steps": 1,
    "output.name": "run",
}
"""Four steps of four prompts: about a tenth of a second each."""

TIMES = {"started", "seconds", "tokens/per_second"}
"""Keys of metrics.jsonl that hold times, beside all keys below time/."""


class Listener:
    """A watcher that records titles, messages and steps."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.messages: list[str] = []
        self.warm_ups: list[int] = []
        self.steps: list[int] = []
        self.closed = 0

    def start(self, title: str, notes: Sequence[str]) -> None:
        self.titles.append(title)
        self.messages.extend(notes)

    def warm_up(self, step: int, steps: int, loss: float) -> None:
        self.warm_ups.append(step)

    def step(
        self,
        step: int,
        steps: int,
        metrics: Mapping[str, float],
        evaluation: Mapping[str, float] | None,
        seconds_left: float | None,
    ) -> None:
        self.steps.append(step)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None:
        self.closed += 1

    @property
    def said(self) -> str:
        return "\n".join(self.messages)


@contextmanager
def light() -> Iterator[None]:
    """Run without reports and flushes to disk, which take half the time of a small run. Other tests cover them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("legato.run.train.write_report", lambda directory: directory.report_path)
        patch.setattr("legato.training.checkpoint._flush", lambda path: None)
        yield


def run_small(folder: Path, options: Mapping[str, Any] | None = None, **arguments: Any) -> Run:
    """Run the smallest training in `folder`/run with changed options; `arguments` go to `train`."""
    return train(**arguments, **{**SMALL, "output.directory": str(folder), **(options or {})})


def words(folder: Path, options: Mapping[str, Any] | None = None) -> list[str]:
    """The options of `small` as words of a command line."""
    chosen = {**SMALL, "output.directory": str(folder), **(options or {})}
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in chosen.items()]


def records(run: Path, *, checkpoints: bool = True) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without times; `checkpoints=False`: also without the lines of checkpoints."""
    lines = RunDirectory.open(run).metrics()
    selected = [record for record in lines if checkpoints or record["kind"] != "checkpoint"]
    return [{k: v for k, v in record.items() if k not in TIMES and not k.startswith("time/")} for record in selected]


def steps(run: Path) -> list[dict[str, Any]]:
    """The records of the steps."""
    return [record for record in records(run) if record["kind"] == "step"]


def tensors(path: Path) -> dict[str, str]:
    """A safetensors file as names and digests of dtype, shape and bytes: independent of the order in the file."""
    digests = {}
    for name, tensor in load_file(path).items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digests[name] = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + raw).hexdigest()
    return digests


def state(checkpoint: Path) -> dict[str, Any]:
    """The contents of a checkpoint in a form that can be compared, without the position in metrics.jsonl."""
    contents = json.loads((checkpoint / "trainer.json").read_text())
    contents.pop("metrics_position")
    # The shape checks of the tests draw from Python's generator. test_checkpoint.py tests it without them.
    contents["generators"].pop("python")
    entries: dict[str, Any] = {f"trainer.json/{key}": value for key, value in contents.items()}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        entries[str(path.relative_to(checkpoint))] = tensors(path)
    return entries


def outcome(run: Path, *, checkpoints: bool = True) -> dict[str, Any]:
    """Metrics, rollouts and last checkpoint of a run, which must be equal in a resumed and an uninterrupted run."""
    directory = RunDirectory.open(run)
    last = directory.checkpoint_path(directory.checkpoint_steps()[-1])
    rollouts = {str(step): directory.rollouts_path(step).read_bytes() for step in directory.rollout_steps()}
    records_of_run = {"metrics": records(run, checkpoints=checkpoints), "health": directory.health.read()}
    return {**records_of_run, "rollouts": rollouts, "last": last.name, **state(last)}


def trained(run: Path) -> dict[str, Any]:
    """The outcome of a run without the records of its start: a warm-up that was cached leaves fewer of them."""
    whole = outcome(run)
    return {**whole, "metrics": [record for record in whole["metrics"] if record["kind"] not in ("start", "warm-up")]}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of the entries that differ."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def cut_run(straight: Path, folder: Path, step: int) -> Path:
    """A copy of a run as after a crash behind `step`: later metrics are there, later checkpoints and rollouts are not."""
    copy = folder / "run"
    shutil.copytree(straight, copy)
    directory = RunDirectory.open(copy)
    for later in (s for s in directory.checkpoint_steps() if s > step):
        shutil.rmtree(directory.checkpoint_path(later))
    for later in (s for s in directory.rollout_steps() if s > step):
        directory.rollouts_path(later).unlink()
    return copy


def rewrite_manifest(checkpoint: Path) -> None:
    """Write the manifest again, so that altered files count as undamaged."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    known = {
        str(path.relative_to(checkpoint)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    record = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**record, "files": known}))


def alter_state(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change trainer.json and write the manifest again."""
    path = checkpoint / "trainer.json"
    contents = json.loads(path.read_text())
    change(contents)
    path.write_text(json.dumps(contents))
    rewrite_manifest(checkpoint)


def alter_tensors(checkpoint: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a safetensors file and write the manifest again."""
    path = checkpoint / name
    contents = load_file(path)
    change(contents)
    save_file(contents, path)
    rewrite_manifest(checkpoint)
