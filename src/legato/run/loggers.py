"""Loggers for TensorBoard, Weights & Biases and trackio. `metrics.jsonl` is always written as well.

A missing package, or a service that does not start, is an error before training. A later failure is shown once and switches
that logger off: logging never ends a run.

W&B and trackio also get a table of completions at each step that stores its rollouts. A resumed run goes on as the same run
there: `tracker.json` in the run directory holds its id at W&B and its name at trackio.
"""

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from legato.errors import InputError


@runtime_checkable
class Logger(Protocol):
    """Receives the metrics of a step, in addition to `metrics.jsonl`."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def log_completions(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


class _Guarded:
    """Runs actions until one raises: the error becomes a message, and later actions are skipped."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say, self._off = name, say, False

    def attempt(self, action: Callable[[], Any]) -> None:
        if self._off:
            return
        try:
            action()
        except Exception as error:  # a library of others, a disk, a network: nothing here is worth the run
            self._off = True
            reason = f"{type(error).__name__}: {error}"
            self._say(f"{self._name} failed and is switched off; training goes on, metrics.jsonl has everything ({reason})")


class TensorBoardLogger:
    """Scalars as TensorBoard event files in `folder`."""

    def __init__(self, folder: Path, *, say: Callable[[str], None], first_step: int = 0) -> None:
        try:
            module = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise InputError("TensorBoard is switched on but not installed: pip install 'legato[tensorboard]'") from error
        self._open: Callable[[int | None], Any] = lambda purge: module.SummaryWriter(log_dir=str(folder), purge_step=purge)
        # A resumed run rewrites the steps after its checkpoint: purge the old ones.
        try:
            self._writer = self._open(first_step if first_step > 0 else None)
        except OSError as error:
            raise InputError(f"TensorBoard cannot write to {folder}: {error.strerror or error}") from error
        self._last = first_step
        self._guard = _Guarded("TensorBoard", say)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._guard.attempt(lambda: self._write(step, scalars(metrics)))

    def log_completions(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """TensorBoard has no tables; the report and the dashboard show the rollouts."""

    def close(self) -> None:
        self._guard.attempt(self._writer.close)

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        if step < self._last:
            # A recovery of the health watch went back; only a new file can purge the later steps.
            self._writer.close()
            self._writer = self._open(step)
        self._last = step
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, global_step=step)
        self._writer.flush()


_COLUMNS = ("step", "prompt", "response", "answer", "reward", "accuracy", "advantage", "tokens", "stop")
"""The columns of a table of completions."""
_MOST_ROWS = 32
_LONGEST_TEXT = 4000


def _completion_rows(step: int, rollouts: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The first rollouts as rows of a table. Long texts are cut."""
    rows = []
    for each in rollouts[:_MOST_ROWS]:
        texts = [str(each.get(key) or "")[:_LONGEST_TEXT] for key in ("prompt", "text", "answer")]
        rows.append([step, *texts, *(each.get(key) for key in ("reward", "accuracy", "advantage", "tokens", "stop"))])
    return rows


class _Identity:
    """The identity of a run at trackers, in a file of the run directory."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tracker.json"

    def read(self, tracker: str) -> str | None:
        try:
            value = json.loads(self._path.read_text(encoding="utf-8")).get(tracker)
        except (OSError, ValueError, AttributeError):  # none yet, or damaged: the tracker gets a new run
            return None
        return value if isinstance(value, str) else None

    def write(self, tracker: str, value: str) -> None:
        others = {name: known for name in ("wandb", "trackio") if (known := self.read(name)) is not None}
        self._path.write_text(json.dumps({**others, tracker: value}) + "\n", encoding="utf-8")


class WandbLogger:
    """Scalars and completions to Weights & Biases, with the resolved config."""

    def __init__(
        self,
        *,
        project: str,
        name: str | None,
        tags: Sequence[str],
        config: Mapping[str, Any],
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        try:
            self._module = import_module("wandb")
        except ImportError as error:
            raise InputError("W&B is switched on but not installed: pip install 'legato[wandb]'") from error
        identity = _Identity(folder)
        known = identity.read("wandb")
        # Only a run that has begun before has an id: W&B continues it, or begins one with that id if it was deleted there.
        same = {} if known is None else {"id": known, "resume": "allow"}
        try:
            self._run = self._module.init(
                project=project, name=name, tags=list(tags), config=dict(config), dir=str(folder), **same
            )
        except Exception as error:
            raise InputError(
                f"W&B did not start ({type(error).__name__}: {error}); `wandb login`, WANDB_MODE=offline, or switch it off"
            ) from error
        self._guard = _Guarded("W&B", say)
        # W&B drops values of earlier steps, which a recovery of the health watch would log; so "step" is a metric.
        self._guard.attempt(lambda: self._run.define_metric("*", step_metric="step"))
        if known is None:
            self._guard.attempt(lambda: identity.write("wandb", str(self._run.id)))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._guard.attempt(lambda: self._run.log({**scalars(metrics), "step": step}))

    def log_completions(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        def log() -> None:
            table = self._module.Table(columns=list(_COLUMNS), data=_completion_rows(step, rollouts))
            self._run.log({"completions": table, "step": step})

        self._guard.attempt(log)

    def close(self) -> None:
        self._guard.attempt(self._run.finish)


class TrackioLogger:
    """Scalars and completions to trackio, with the resolved config."""

    def __init__(
        self, *, project: str, name: str, config: Mapping[str, Any], folder: Path, say: Callable[[str], None]
    ) -> None:
        try:
            self._module = import_module("trackio")
        except ImportError as error:
            raise InputError("trackio is switched on but not installed: pip install 'legato[trackio]'") from error
        identity = _Identity(folder)
        known = identity.read("trackio")
        # trackio finds a run to resume by its name alone, and runs of several folders may have the same.
        own_name = known or f"{name}-{secrets.token_hex(3)}"
        try:
            self._run = self._module.init(project=project, name=own_name, config=dict(config), resume="allow")
        except Exception as error:
            raise InputError(
                f"trackio did not start ({type(error).__name__}: {error}); set TRACKIO_DIR to a folder that can be written,"
                " or switch it off"
            ) from error
        self._guard = _Guarded("trackio", say)
        if known is None:
            self._guard.attempt(lambda: identity.write("trackio", own_name))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._guard.attempt(lambda: self._run.log(scalars(metrics), step=step))

    def log_completions(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        def log() -> None:
            table = self._module.Table(columns=list(_COLUMNS), data=_completion_rows(step, rollouts))
            self._run.log({"completions": table}, step=step)

        self._guard.attempt(log)

    def close(self) -> None:
        self._guard.attempt(self._run.finish)


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the metrics; text and histograms go to `metrics.jsonl` only."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
