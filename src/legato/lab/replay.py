"""Repeats a step of a run from the newest checkpoint before it, and records every update.

On a CPU a run repeats to the bit, so the responses equal the stored ones; the note says if they do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from legato.core.batch import collate
from legato.core.rollout import Rollout
from legato.errors import InputError
from legato.lab.recorder import ObservedUpdate, Say, UpdateRecorder, recorder_of
from legato.records.directory import RunDirectory
from legato.run.target import find
from legato.training import checkpoint
from legato.training.report import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One repeated step of a run with its updates."""

    recorder: UpdateRecorder
    step: int
    report: StepReport
    observed: tuple[ObservedUpdate, ...]
    note: str
    """Whether the responses equal those the run stored."""

    def rollouts(self) -> list[Rollout]:
        """Return the rollouts in the order of rows and of stored rollouts."""
        return [member.rollout for group in self.report.groups for member in group.members]

    def group_of(self) -> torch.Tensor:
        """Return the group number of each row, [B]."""
        return collate(self.report.groups).texts.siblings


def replay(path: Path, step: int | None, words: Sequence[str], say: Say) -> ReplayedStep:
    """Repeat step `step` of a run; by default the step after its newest checkpoint."""
    directory = RunDirectory.open(path)
    checkpoints = directory.checkpoint_steps()
    if not checkpoints:
        raise InputError(f"{path} has no checkpoint, which repeating a step needs")
    wanted = checkpoints[-1] + 1 if step is None else step
    done = max((int(each["step"]) for each in directory.metrics() if each.get("kind") == "step"), default=0)
    # Without --step it is the step after the newest checkpoint, which a finished run has not reached.
    if wanted > max(done, checkpoints[-1] + 1):
        raise InputError(
            f"expected --step from {checkpoints[0] + 1} to {max(done, checkpoints[-1] + 1)}, got {wanted}"
            f" ({path} has {done} steps)"
        )
    before = [each for each in checkpoints if each < wanted]
    if not before:
        raise InputError(
            f"expected --step from {checkpoints[0] + 1} on, got {wanted} (the earliest checkpoint of {path} is of step"
            f" {checkpoints[0]}); output.keep_last and output.checkpoint_every_steps keep more checkpoints"
        )
    recorder = restore_recorder(directory, before[-1], words)
    while recorder.trainer.steps_done < wanted - 1:
        recorder.trainer.step()
        say(f"repeated step {recorder.trainer.steps_done}")
    # Also record responses without an advantage; the updates are the same up to rounding.
    recorder.trainer.settings = replace(recorder.trainer.settings, skip_silent_rows=False)
    report = recorder.step()
    if not report.groups:
        raise InputError(f"step {wanted} had nothing to train on: too few of its rollouts could be scored")
    note = _compare_with_stored(directory, wanted, report)
    return ReplayedStep(recorder=recorder, step=wanted, report=report, observed=tuple(recorder.observed), note=note)


def restore_recorder(directory: RunDirectory, step: int, words: Sequence[str] = ()) -> UpdateRecorder:
    """Return the trainer of a run restored from the checkpoint of a step."""
    target = find(str(directory.path), words, step)
    policy, source = target.prepare()
    recorder = recorder_of(
        target.resolved, policy, source, skip_silent_rows=target.resolved.config.training.skip_silent_rows
    )
    folder = directory.checkpoint_path(step)
    state = checkpoint.read_state(folder)
    checkpoint.restore(folder, policy, recorder.trainer.optimizer, state)
    recorder.trainer.load_sampler(checkpoint.sampler_state(folder))
    recorder.trainer.load_state_dict(state["trainer"])
    return recorder


def _compare_with_stored(directory: RunDirectory, step: int, report: StepReport) -> str:
    if step not in directory.rollout_steps():
        return f"Step {step} was done again; the run stored no rollouts of it to compare with"
    stored = [record["text"] for record in directory.read_rollouts(step)]
    texts = [member.rollout.text for group in report.groups for member in group.members]
    same = sum(one == other for one, other in zip(texts, stored, strict=False))
    if same == len(texts):
        return f"Step {step} was done again: all {same} responses are those the run stored"
    return (
        f"Step {step} was done again: {same} of {len(texts)} responses are those the run stored; the others came out"
        " otherwise, as they do on a GPU, with other versions or with other options"
    )
