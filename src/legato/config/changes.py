"""Decides which options a resumed run may change: freely, with --allow-changes, or not at all (docs/resume.md).

Each option declares its rule (`resume=`). 'free': the option affects the length of the run or its records, but not the
updates. 'flag': the option changes the training. 'refused': the saved state would not fit, or training would have used
held-out problems.
"""

import functools

from legato.config.document import options
from legato.config.resolved import Resolved
from legato.errors import InputError


@functools.cache
def _resume_rules() -> dict[str, str]:
    return {option.path: option.resume for option in options()}


def verdict(path: str) -> str:
    """'free', 'flag' or 'refused' for an option. Options of algorithms, tasks and rewards need the flag."""
    if path.startswith("evaluation.sets."):
        path = "evaluation.sets"  # its tables have names of the writer's choice and options of tasks and rewards
    return _resume_rules().get(path, "flag")


def check(before: Resolved, after: Resolved, allowed: bool) -> list[str]:
    """One sentence per change; InputError if a change is refused or needs the flag."""
    old, new = before.values, after.values
    sentences, faults = [], []
    for path in sorted({*old, *new}):
        if old.get(path) == new.get(path):
            continue
        change = f"{path} = {new.get(path)!r} (was {old.get(path)!r})"
        kind = verdict(path)
        if path == "training.steps" and _lr_follows_steps(before, after):
            kind, change = (
                "flag",
                f"{change}, which the learning rate follows (schedule, warm_up_updates),",
            )
        if kind == "refused":
            faults.append(f"{change} cannot change in a resumed run; start a new one")
        elif kind == "flag" and not allowed:
            faults.append(
                f"{change} changes the training; add --allow-changes (in Python allow_changes=True) if that is what you want"
            )
        else:
            sentences.append(f"changed: {change.removesuffix(',')}")
    if faults:
        raise InputError("\n".join(faults))
    return sentences


def _lr_follows_steps(*runs: Resolved) -> bool:
    """Whether learning rates depend on the number of steps: a falling schedule, or a warm-up cut to the run's length."""
    return any(run.config.training.schedule != "constant" or run.config.training.shortens_warm_up for run in runs)
