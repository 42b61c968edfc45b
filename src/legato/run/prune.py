"""What a run directory can do without: files that are made again, and most checkpoints.

The newest good checkpoint stays, and the best one, and the one that the health watch would go back to.
"""

import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.algorithms.catalogue import entry
from legato.errors import InputError
from legato.health.actions import Health, HealthSettings
from legato.records.directory import RunDirectory, size_of
from legato.records.lines import explain_os_errors
from legato.records.lock import hold_lock
from legato.training import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Removable:
    """A file or folder that may go, with the reason."""

    path: Path
    why: str
    size: int
    """Bytes on disk."""


def removable(directory: RunDirectory) -> list[Removable]:
    """What can be removed from a run that nobody trains.

    Records, rollouts, evidence, the reference and what `resume --step` gave up stay: nothing makes them again.
    """
    return [Removable(path=path, why=why, size=size_of(path)) for path, why in _removable(directory)]


def _removable(directory: RunDirectory) -> Iterator[tuple[Path, str]]:
    if directory.report_path.is_file():
        yield directory.report_path, f"legato report {directory.path} writes it again"
    folder = directory.path / "checkpoints"
    for path in sorted(folder.glob(".step-*.partial")) if folder.is_dir() else ():
        if not _is_half_renamed(path):
            yield path, "half-written by a process that was killed"
    steps = directory.checkpoint_steps()
    damaged = sorted(folder.glob("damaged-step-*"))
    if len(steps) + len(damaged) < 2:
        return
    try:
        newest, _ = checkpoint.latest(folder)
        state = checkpoint.read_state(newest)
        with checkpoint.explain_contents(newest):
            kept = {newest.name, *_best(state), *map(checkpoint.name_of, _healthy_steps(directory, newest, state))}
    except InputError:
        return  # no good checkpoint: none is removed
    for path in damaged:
        yield path, "damaged; an earlier one was resumed"
    for step in steps:
        path = directory.checkpoint_path(step)
        if path.name not in kept:
            newer = path.name > newest.name
            yield path, "damaged" if newer else f"{newest.name} is newer; training makes it again"


def _is_half_renamed(path: Path) -> bool:
    """Whether a folder is a whole checkpoint whose process was killed while it saved it again (`checkpoint.put_back`)."""
    ending = ".before.partial"
    return path.name.endswith(ending) and not path.with_name(path.name.removeprefix(".").removesuffix(ending)).exists()


def _best(state: Mapping[str, Any]) -> list[str]:
    """The name of the best checkpoint, if there is one."""
    best = state.get("best")
    return [] if best is None else [str(best[1])]


def _healthy_steps(directory: RunDirectory, newest: Path, state: Mapping[str, Any]) -> list[int]:
    """The steps of checkpoints to go back to after an alarm. The newest one was saved at the alarm.

    `state` is that of the newest whole checkpoint.
    """
    ends = [record for record in directory.metrics_file.readable() if record.get("kind") == "end"]
    named = ends[-1].get("healthy") if ends else None
    # The state holds only rules that the run watched, so the algorithm and the ignored rules make no difference here.
    options = HealthSettings(action=_health_action(directory))
    health = Health(options, entry("grpo").value, 0, directory, lambda text: None)
    health.load_state(state.get("health", {}))
    last = int(state["trainer"]["steps_done"])
    kept = health.checkpoints_to_keep([step for step in directory.checkpoint_steps() if step <= last], last)
    return [*kept, *([] if named is None else [int(named)])]


def _health_action(directory: RunDirectory) -> str:
    """`health.action` of the run. An action that keeps a healthy checkpoint if config.toml cannot be read."""
    try:
        action = tomllib.loads(directory.config_path.read_text(encoding="utf-8")).get("health", {}).get("action", "say")
        return str(HealthSettings(action=action).action)
    except (OSError, ValueError, AttributeError, InputError):
        return "stop"


def prune(directory: RunDirectory) -> int:
    """Remove what can be removed, with the run's lock held; returns the bytes. InputError if the run is going on."""
    freed = 0
    with hold_lock(directory):
        for each in removable(directory):
            with explain_os_errors(each.path, "remove"):
                shutil.rmtree(each.path) if each.path.is_dir() else each.path.unlink()
            freed += each.size
    return freed
