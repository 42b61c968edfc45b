"""Recovery: go back to a healthy checkpoint and continue with changed settings.

A deterministic trainer that is only rolled back would repeat its failure, so a recovery always changes something: the
learning rate, the clip or the problems. Weights keep their address: loaded values are copied into them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from legato.core.world import on_first_rank
from legato.health.actions import Health
from legato.health.rule import Finding, Rule
from legato.health.watch import Watch
from legato.policy.model.load import take_weights
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.records.repair import fit_metrics
from legato.training import checkpoint
from legato.training.step import Trainer


@runtime_checkable
class RunningRun(Protocol):
    """The parts of a run that a recovery reads and changes (`run/execute.py`)."""

    policy: Policy
    trainer: Trainer
    health: Health
    directory: RunDirectory
    best: tuple[float, str] | None
    start_record: Mapping[str, Any]

    @property
    def trust_remote_code(self) -> bool: ...

    def checkpoint_steps(self) -> list[int]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def tighten(self, scale: float) -> None: ...

    def save_again(self) -> None: ...


class NoRecoveryError(Exception):
    """The run cannot recover. The message is the reason with which the run ends."""


def recover(execution: RunningRun, alarm: Finding) -> None:
    """Roll the run back and change the settings that `health.*` names. NoRecoveryError if that is impossible."""
    health, trainer, directory = execution.health, execution.trainer, execution.directory
    options = health.options
    if len(health.recoveries) >= options.recoveries:
        raise NoRecoveryError(f"{alarm.words} The run has recovered {len(health.recoveries)} times, which is all it may.")
    world = trainer.world
    candidates = health.checkpoints_by_health(execution.checkpoint_steps(), alarm.step)
    healthy = on_first_rank(world, lambda: _find_healthy_checkpoint(directory, candidates, health.watch.rules))
    if healthy is None:
        raise NoRecoveryError(f"{alarm.words} There is no whole checkpoint from before it to go back to.")
    folder = directory.checkpoint_path(healthy)
    failed, drawn = trainer.steps_done, trainer.source.drawn
    lr_scale, clip_scale = trainer.optimizer.scale * options.lr_factor, health.clip_scale * options.clip_factor
    earlier = list(health.recoveries)
    state = checkpoint.read_state(folder)
    evidence = health.evidence_folder(alarm.step)
    best, step = None, int(state["trainer"]["steps_done"])
    if directory.writes:
        # Checkpoints first: a run that is killed here must not resume from a checkpoint newer than its metrics.
        best = checkpoint.give_up(folder.parent, folder, None if execution.best is None else execution.best[1])
        position, lost = fit_metrics(directory, int(state["metrics_position"]), step, execution.start_record)
        _set_aside_later_records(directory, position, step, evidence)
        for sentence in lost:
            health.say(sentence)
    restore(execution, folder, state)
    trainer.optimizer.scale = lr_scale
    skipped = drawn - trainer.source.drawn if options.skip_data else 0
    trainer.source.go_to(trainer.source.drawn + skipped)
    recovery = {
        "step": trainer.steps_done,
        "from": failed,
        "rule": alarm.rule,
        "lr_scale": lr_scale,
        "clip_scale": clip_scale,
        "problems_skipped": skipped,
    }
    health.recoveries = [*earlier, recovery]
    execution.tighten(clip_scale)
    words = _describe(recovery, len(health.recoveries), options.recoveries)
    folders = {"evidence": evidence if evidence.is_dir() else None, "best": best}
    where = {name: str(path.relative_to(directory.path)) for name, path in folders.items() if path is not None}
    directory.health.append(
        {"kind": "recovery", **recovery, "words": f"{alarm.words} {words[0].upper()}{words[1:]}.", **where}, sync=True
    )
    health.say(words + ("" if best is None else f"; the best checkpoint, which is newer, stays as {best}"))
    # Save the changed settings: a run that is killed now resumes into its recovery and not into its collapse.
    execution.save_again()


def restore(execution: RunningRun, folder: Path, state: dict[str, Any]) -> None:
    """Load a checkpoint into the objects of a running run."""
    take_weights(execution.policy, folder / "model", execution.trust_remote_code)
    checkpoint.restore(folder, execution.policy, execution.trainer.optimizer, state, execution.trainer.world)
    execution.trainer.load_sampler(checkpoint.sampler_state(folder))
    execution.load_state(state)
    execution.health.evidence.forget()


def _find_healthy_checkpoint(directory: RunDirectory, candidates: Sequence[int], rules: Sequence[Rule]) -> int | None:
    """Return the first candidate step whose checkpoint is whole and was not itself saved during an alarm."""
    for step in candidates:
        folder = directory.checkpoint_path(step)
        try:
            checkpoint.verify(folder)
        except checkpoint.DamagedError:
            continue
        if not _in_alarm(folder, rules):
            return step
    return None


def _in_alarm(folder: Path, rules: Sequence[Rule]) -> bool:
    """Whether an alarm held when the checkpoint was saved. A run resumed from it would still be in alarm."""
    state = checkpoint.read_state(folder).get("health")
    if not state:
        return False
    watch = Watch(rules)
    watch.load(state["watch"])
    return bool(watch.alarms())


def _set_aside_later_records(directory: RunDirectory, position: int, step: int, folder: Path) -> None:
    """Move metrics and rollouts after `step` to the evidence folder, or delete them, so that each step is recorded once."""
    if folder.is_dir():
        (folder / "abandoned.jsonl").write_bytes(directory.metrics_file.after(position))
    directory.metrics_file.truncate(position)
    for later in [each for each in directory.rollout_steps() if each > step]:
        path = directory.rollouts_path(later)
        if folder.is_dir():
            path.replace(folder / f"abandoned-{later:06d}.jsonl.gz")
        else:
            path.unlink()


def _describe(recovery: Mapping[str, Any], number: int, most: int) -> str:
    changes = [f"learning rate x {recovery['lr_scale']:g}"]
    changes += [f"clip x {recovery['clip_scale']:g}"] if recovery["clip_scale"] != 1 else []
    changes += [f"{recovery['problems_skipped']} problems skipped"] if recovery["problems_skipped"] else []
    return f"recovery {number} of {most}: back from step {recovery['from']} to step {recovery['step']}, {', '.join(changes)}"
