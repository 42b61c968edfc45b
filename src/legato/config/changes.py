"""What may change when a run is resumed: freely, with --allow-changes, or not at all. docs/resume.md has the table.

Each option declares it (`resume=`). 'free': changes the length of the run, or what is written and how often, but not the
updates. 'flag': changes the training. 'refused': the saved state would not fit, or held-out problems would have been
trained on.
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
            kind = "flag"
        if kind == "refused":
            faults.append(f"{change} cannot change in a resumed run; start a new one")
        elif kind == "flag" and not allowed:
            faults.append(f"{change} makes another run of it; add --allow-changes if that is what you want")
        else:
            sentences.append(f"changed: {change}")
    if faults:
        raise InputError("\n".join(faults))
    return sentences


def _lr_follows_steps(*runs: Resolved) -> bool:
    """Whether learning rates depend on the number of steps: a falling schedule, or a warm-up cut to the run's length."""
    return any(run.config.training.schedule != "constant" or run.config.training.shortens_warm_up for run in runs)
