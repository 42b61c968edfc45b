"""From a definition to its runs: one checked configuration each, arms that share problems, weights and budget."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from legato.compare.definition import Bed, Definition
from legato.config.load import load
from legato.config.messages import show_value
from legato.config.resolved import Resolved
from legato.errors import InputError

SHARED = (
    "task.*",
    "reward.*",
    "policy.*",
    "evaluation.*",
    "rollouts.samples_per_prompt",
    "rollouts.max_response_tokens",
    "training.steps",
    "training.prompts_per_step",
    "training.updates_per_step",
    "training.epochs_per_step",
)
"""What makes problems, weights, the measure and the budget of a run: equal in all arms."""

OWN = ("task.resampling", "task.max_refills", "reward.overlong*", "policy.packing", "policy.gradient_checkpointing")
"""Of these an arm's own: what belongs to an algorithm (DAPO's resampling and punishment), and what changes no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a comparison."""

    name: str
    bed: str = ""
    """The test bed; "" where there is only one."""
    arm: str
    seed: int
    point: Mapping[str, Any]
    """The swept paths and their values here; empty without a sweep."""
    resolved: Resolved

    def origin_key(self) -> tuple[object, ...]:
        """Runs that agree on this start from the same weights and problems."""
        made_of = {path: value for path, value in self.resolved.values.items() if path.startswith(("policy.", "task."))}
        unlike = {path for path in made_of if any(fnmatchcase(path, pattern) for pattern in OWN)}
        return self.seed, repr(sorted((path, value) for path, value in made_of.items() if path not in unlike))


def jobs(definition: Definition, folder: Path, *, keep_checkpoints: bool = True) -> list[Job]:
    """Return all runs, seed by seed, so that early results can be compared. InputError if a configuration is wrong.

    Without `keep_checkpoints`, runs write none when they begin and end.
    """
    planned = []
    beds, warm = definition.all_beds, dict[str, dict[str, Any]]()
    for seed, place, point, arm in itertools.product(definition.seeds, beds, points(definition), definition.arms):
        bed = beds[place]
        if bed.arms is not None and arm not in bed.arms:
            continue
        swept = [f"{path.rpartition('.')[2]}{value}" for path, value in point.items()]
        # The name of a folder and of a file: `legato train` takes what holds an equals sign for an option.
        name = re.sub(r"[^A-Za-z0-9._+-]", "_", "-".join([*filter(None, [place]), arm, *swept, f"seed{seed}"]))
        ours = {
            "training.seed": seed,
            "output.directory": str(folder / "runs"),
            "output.name": name,
            # Every run does all of its steps: one that stopped at a target would have had a smaller budget.
            "evaluation.target": None,
            "evaluation.target_greedy": None,
            **({} if keep_checkpoints else {"output.checkpoint_at_end": False}),
        }
        try:
            options = {**definition.options, **bed.options, **definition.arms[arm], **point, **ours}
            if place not in warm:
                warm[place] = _warm_up_options(bed, options, folder)
            resolved = load(bed.recipes, (), {**warm[place], **options})
        except InputError as error:
            raise InputError("\n".join(f"arm {arm}: {line}" for line in str(error).splitlines())) from None
        planned.append(Job(name=name, bed=place, arm=arm, seed=seed, point=point, resolved=resolved))
    twice = next((job.name for job in planned if sum(job.name == each.name for each in planned) > 1), None)
    if twice is not None:
        raise InputError(f"two runs would be called {twice}; give arms and swept values names that can be told apart")
    return planned


def _warm_up_options(bed: Bed, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A cache for the warm-up of a bed, if it has one: the arms of a seed start from the same weights."""
    stage = load(bed.recipes, (), options).config.policy.warm_up
    return {} if stage is None or stage.cache is not None else {"policy.warm_up.cache": str(folder / "warm")}


def points(definition: Definition) -> list[dict[str, Any]]:
    """Every combination of swept values; one empty one without a sweep."""
    return [dict(zip(definition.sweep, values, strict=True)) for values in itertools.product(*definition.sweep.values())]


def differences(planned: Sequence[Job]) -> list[str]:
    """Return a sentence for each setting that arms at one point must share and do not."""
    sentences: dict[str, None] = {}
    first: dict[str, Job] = {}
    for job in planned:
        base = first.setdefault(repr((job.bed, job.seed, job.point)), job)
        for path, mine, theirs in _unequal_settings(base, job):
            sentences[
                f"{path} is {show_value(theirs)} for {base.arm} ({base.resolved.provenance.get(path, 'default')}) and"
                f" {show_value(mine)} for {job.arm} ({job.resolved.provenance.get(path, 'default')})"
            ] = None
    return list(sentences)


def _unequal_settings(base: Job, job: Job) -> Iterator[tuple[str, Any, Any]]:
    mine, theirs = job.resolved.values, base.resolved.values
    for path in sorted({*mine, *theirs}):
        shared = any(fnmatchcase(path, pattern) for pattern in SHARED)
        if shared and not any(fnmatchcase(path, pattern) for pattern in OWN) and mine.get(path) != theirs.get(path):
            yield path, mine.get(path), theirs.get(path)
