"""A step of a run done again: the newest checkpoint before it is taken up and trained on, with eyes on every update.

On a CPU a run repeats to the bit, so the responses are those the run stored; where they are not, that is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from legato.core.batch import collate
from legato.core.rollout import Rollout
from legato.errors import InputError
from legato.lab.bed import Bed, Observed, Say, bed_of
from legato.records.directory import RunDirectory
from legato.run.target import find
from legato.training import checkpoint
from legato.training.report import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One step of a run, seen."""

    bed: Bed
    step: int
    report: StepReport
    seen: tuple[Observed, ...]
    note: str
    """Whether it is what the run did."""

    def rollouts(self) -> list[Rollout]:
        """In the order of rows and of the stored rollouts."""
        return [member.rollout for group in self.report.groups for member in group.members]

    def group_of(self) -> torch.Tensor:
        """[B]: which group each row belongs to."""
        return collate(self.report.groups).texts.group


def replay(path: Path, step: int | None, words: Sequence[str], say: Say) -> Replayed:
    """Step `step` of a run again; without it the step that comes after its newest checkpoint."""
    directory = RunDirectory.open(path)
    kept = directory.checkpoint_steps()
    if not kept:
        raise InputError(f"{path} has no checkpoint; a step can be done again from one")
    wanted = kept[-1] + 1 if step is None else step
    done = max((int(each["step"]) for each in directory.metrics() if each.get("kind") == "step"), default=0)
    # Without --step the one after the newest checkpoint is done, which a run that ended there has not come to.
    if wanted > max(done, kept[-1] + 1):
        raise InputError(
            f"--step {wanted} is asked for; {path} has {done} steps; those from {kept[0] + 1} can be done again"
        )
    before = [each for each in kept if each < wanted]
    if not before:
        raise InputError(
            f"--step {wanted} is asked for; the earliest checkpoint of {path} is of step {kept[0]}, so steps from"
            f" {kept[0] + 1} can be done again; output.keep_last and output.checkpoint_every_steps keep more of a run"
        )
    bed = restored(directory, before[-1], words)
    while bed.trainer.steps_done < wanted - 1:
        bed.trainer.step()
        say(f"step {bed.trainer.steps_done} again")
    # Here also responses without an advantage are looked at; the updates are the same but for rounding.
    bed.trainer.settings = replace(bed.trainer.settings, skip_silent_rows=False)
    report = bed.step()
    if not report.groups:
        raise InputError(f"step {wanted} had nothing to train on: too few of its rollouts could be scored")
    note = _compared(directory, wanted, report)
    return Replayed(bed=bed, step=wanted, report=report, seen=tuple(bed.seen), note=note)


def restored(directory: RunDirectory, step: int, words: Sequence[str] = ()) -> Bed:
    """The trainer of a run as the checkpoint of a step has it."""
    target = find(str(directory.path), words, step)
    policy, source = target.prepare()
    bed = bed_of(target.resolved, policy, source, skip_silent_rows=target.resolved.config.training.skip_silent_rows)
    folder = directory.checkpoint_path(step)
    memory = checkpoint.read_state(folder)
    checkpoint.restore(folder, policy, bed.trainer.optimizer, memory)
    bed.trainer.load_sampler(checkpoint.sampler_state(folder))
    bed.trainer.load_state_dict(memory["trainer"])
    return bed


def _compared(directory: RunDirectory, step: int, report: StepReport) -> str:
    if step not in directory.rollout_steps():
        return f"Step {step} was done again; the run stored no rollouts of it to compare with"
    stored = [record["text"] for record in directory.read_rollouts(step)]
    made = [member.rollout.text for group in report.groups for member in group.members]
    same = sum(one == other for one, other in zip(made, stored, strict=False))
    if same == len(made):
        return f"Step {step} was done again: all {same} responses are those the run stored"
    return (
        f"Step {step} was done again: {same} of {len(made)} responses are those the run stored; the others came out"
        " otherwise, as they do on a GPU, with other versions or with other options"
    )
