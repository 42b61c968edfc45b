"""Commands to show after a run that ended early: how to resume it, or how to start it again."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from legato.config.load import load
from legato.config.resolved import Resolved
from legato.health.explain import lr_scale
from legato.records.directory import RunDirectory, unused_name
from legato.training import checkpoint


def resume_advice(directory: RunDirectory, program: str, *, lost: bool) -> str:
    """The command that resumes a run.

    With `lost` the health watch ended the run: the command goes back to a healthy checkpoint and lowers the learning rate.
    """
    path = shlex.quote(str(directory.path))
    command = f"{program} resume {path}"
    if not lost:
        return command
    resolved, healthy = load([directory.config_path]), directory.metrics()[-1].get("healthy")
    failed = resolved.config.training.lr * lr_scale(directory.health.read())
    half = f"a learning rate of {failed / 2:g}, half of the {failed:g} it was stopped with"
    why = f"why it stopped: {program} doctor {path}"
    if healthy is None:
        again = restart_advice(directory.path, resolved, ())
        return f"there is no earlier checkpoint to go back to; {again} training.lr={failed / 2:g} ({half}); {why}"
    state, health = checkpoint.read_state(directory.checkpoint_path(healthy)), resolved.config.health
    scale, done = float(state["optimizer"].get("scale", 1.0)), len(state["health"]["recoveries"])
    changes = [f"training.lr={failed / scale / 2:g}"]
    if health.action == "recover" and done >= health.recoveries:
        # A resumed run keeps its count of recoveries: without more of them it would end at the next alarm.
        changes.append(f"health.recoveries={done + health.recoveries}")
    scaled = (
        "" if scale == 1 else f", as training.lr times {scale:g}: earlier recoveries lowered it and a resumed run keeps that"
    )
    return (
        f"{command} --step {healthy} {' '.join(changes)} --allow-changes"
        f" ({half}{scaled}; back at step {healthy}, the healthiest checkpoint); {why}"
    )


def restart_advice(directory: Path, resolved: Resolved, python_inputs: Sequence[str]) -> str:
    """How to start a run again, under an unused name. `python_inputs`: names of inputs that were Python objects."""
    if python_inputs:
        return f"begin again from Python with the same {' and '.join(python_inputs)}"
    name = resolved.config.output.name
    words = [str(directory / "config.toml")]
    words += [] if name is None else [f"output.name={unused_name(directory.parent, name, 2)}"]
    return f"begin again with legato train {shlex.join(words)}"
