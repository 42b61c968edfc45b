"""Run directories that hold nothing to resume: of a start that failed, or of a run killed before its first checkpoint."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.errors import InputError
from legato.records.directory import RunDirectory
from legato.records.lines import explain_os_errors

_OURS = {
    *(".lock", "config.toml", "environment.json", "metrics.jsonl", "health.jsonl", "report.html", "tracker.json"),
    *("rollouts", "evidence", "reference", "tensorboard", "wandb", "checkpoints", "journal", "given-up"),
}
"""The names of what a run without a checkpoint writes."""
_DAMAGED = ("metrics-damaged-", "health-damaged-")
"""How the names of damaged records begin that a repair has set aside."""


def begun_steps(directory: RunDirectory) -> int | None:
    """The steps that a run without a checkpoint has recorded; None if it has a checkpoint or the folder is not a run's.

    Other files may lie in the folder, say the log of a batch system.
    """
    if not directory.path.is_dir():
        return None
    records = directory.metrics_file.readable()
    saved = directory.path / "checkpoints"
    if not _is_run(directory, records) or (saved.is_dir() and any(map(_is_kept, saved.iterdir()))):
        return None
    return max((int(each.get("step", 0)) for each in records if each.get("kind") == "step"), default=0)


def _is_run(directory: RunDirectory, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether Legato wrote the folder. Names are no evidence: a user may have put a config.toml there.

    A start writes .lock first and environment.json next.
    """
    if "format" in (directory.readable_environment() or {}) or any(each.get("kind") == "start" for each in records):
        return True
    names = {path.name for path in directory.path.iterdir()}
    return ".lock" in names and all(name == ".lock" or _is_partial(name) for name in names)


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


def _is_ours(name: str) -> bool:
    """Whether a run without a checkpoint writes a file or folder of this name."""
    return name in _OURS or _is_partial(name) or name.startswith(_DAMAGED)


def _is_kept(path: Path) -> bool:
    """Whether a folder in checkpoints/ holds a state, be it damaged or half renamed; a half-written one does not."""
    return not path.name.endswith(".partial") or path.name.endswith(".before.partial")


def clear_begun(directory: RunDirectory) -> None:
    """Remove what a run without a checkpoint has written; recorded steps move to given-up/. The caller holds its lock.

    Files that the run did not write stay.
    """
    steps = begun_steps(directory)
    if steps is None:
        raise InputError(f"expected a run without a checkpoint, got {directory.path}, which holds more; resume it")
    with explain_os_errors(directory.path, "write"):
        kept = directory.path / "given-up"
        paths = [path for path in directory.path.iterdir() if _is_ours(path.name)]
        paths = [path for path in paths if path.name not in (".lock", kept.name)]
        if steps or any(path.name.startswith(_DAMAGED) for path in paths):
            number = 1
            while (folder := kept / f"start-{number}").exists():
                number += 1
            folder.mkdir(parents=True)
            for path in paths:
                shutil.move(path, folder / path.name)
            return
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
