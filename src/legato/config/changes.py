"""What may change when a run is resumed: freely, with --allow-changes, or not at all. docs/resume.md has the table.

Each option says so where it is declared (`resume=`): 'free' changes how long a run goes on, what is written and how often,
and the updates stay what they were; 'flag' makes another run of it; 'refused': the saved state would not fit, or held-out
problems would have been trained on.
"""

import functools

from legato.config.document import options
from legato.config.resolved import Resolved
from legato.errors import InputError


@functools.cache
def _declared() -> dict[str, str]:
    return {option.path: option.resume for option in options()}


def verdict(path: str) -> str:
    """'free', 'flag' or 'refused' for an option; those of an algorithm, a task or a reward are not declared here."""
    return _declared().get(path, "flag")


def check(before: Resolved, after: Resolved, allowed: bool) -> list[str]:
    """A sentence for each change; InputError where one is refused or lacks the flag."""
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
    """A falling schedule is stretched over the steps, and a warm-up longer than a run is shortened to it."""
    return any(run.config.training.schedule != "constant" or run.config.training.shortens_warm_up for run in runs)
