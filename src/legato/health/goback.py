"""Going back to an earlier checkpoint at the user's request: later records are moved to a folder of their own.

given-up/step-000060/       as far as the run had come
  metrics.jsonl             the lines after the checkpoint
  health.jsonl
  checkpoints/, rollouts/, evidence/   what stood there of later steps
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legato.errors import InputError
from legato.records.directory import RunDirectory, unused_name
from legato.records.lines import Lines, explain_os_errors, parse_line
from legato.records.repair import fit_health, fit_metrics
from legato.training import checkpoint


def find_checkpoint(directory: RunDirectory, step: int) -> Path:
    """Return the checkpoint folder of a step, after checking that it is whole."""
    folder = directory.checkpoint_path(step)
    if not folder.is_dir():
        there = ", ".join(map(str, directory.checkpoint_steps())) or "none"
        raise InputError(f"{directory.path} has no checkpoint of step {step}; there are: {there}")
    checkpoint.check(folder)
    return folder


def positions_at(
    directory: RunDirectory, state: Mapping[str, Any], start: Mapping[str, Any]
) -> tuple[dict[Lines, int], list[str]]:
    """The byte position of each JSON-lines file when the checkpoint with this state was saved; what was lost, as sentences.

    A damaged file is repaired. `start` becomes its first record if that one is lost.
    """
    step = int(state["trainer"]["steps_done"])
    metrics, lost = fit_metrics(directory, int(state["metrics_position"]), step, start)
    # A run from before the health watch has no position.
    health, more = fit_health(directory, int(state.get("health", {}).get("position", 0)), step)
    return {directory.metrics_file: metrics, directory.health: health}, [*lost, *more]


def give_up(directory: RunDirectory, step: int, positions: Mapping[Lines, int]) -> Path | None:
    """Move all that follows the checkpoint of `step` to given-up/; None if nothing does. `positions`: of `positions_at`.

    Lines are only copied: the run that is resumed cuts them off. Killed at any point, the run can be resumed, from this
    checkpoint or from the newest that is still there.
    """
    lines = {file: file.after(position) for file, position in positions.items()}
    records = [parse_line(line) or {} for line in lines[directory.metrics_file].splitlines()]
    later = [each for each in directory.checkpoint_steps() if each > step]
    reached = max([step, *later, *(int(each["step"]) for each in records if each.get("kind") == "step")])
    if reached == step:
        return None
    parent, name = directory.path / "given-up", f"step-{reached:06d}"
    folder = parent / (unused_name(parent, name, 2) if (parent / name).exists() else name)
    with explain_os_errors(folder, "write"):
        folder.mkdir(parents=True)
        for file, data in lines.items():
            (folder / file.path.name).write_bytes(data)
        paths = [directory.checkpoint_path(each) for each in reversed(later)]
        paths += [directory.rollouts_path(each) for each in directory.rollout_steps() if each > step]
        paths += [directory.path / name for name in _evidence(lines[directory.health])]
        for path in paths:
            if path.exists():
                to = folder / path.relative_to(directory.path)
                to.parent.mkdir(exist_ok=True)
                shutil.move(path, to)
    return folder


def _evidence(health: bytes) -> list[str]:
    """Return the evidence folders named in these lines of health.jsonl."""
    records = [parse_line(line) or {} for line in health.splitlines()]
    return list(dict.fromkeys(str(each["evidence"]) for each in records if each.get("evidence")))
