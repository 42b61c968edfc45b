"""What may change when a run is resumed: freely, with --allow-changes, or not at all. docs/resume.md has the table."""

from fnmatch import fnmatchcase

from legato.config.resolved import Resolved
from legato.errors import InputError

FREE = (
    "training.steps",
    "training.probe_every_steps",
    "training.accept_unsafe_anchor",
    "evaluation.*",
    "health.*",
    "output.*",
    "rollouts.rows_at_once",
    "policy.gradient_checkpointing",
    "rollouts.kv_memory_share",
)
"""Change how long a run goes on, what is written and how often; the updates stay what they were."""

REFUSED = (
    "policy.model",
    "policy.tiny.*",
    "policy.upcycle*",
    "policy.lora*",
    "policy.warm_up*",
    "policy.frozen",
    "policy.dtype",
    "training.optimizer",
    "training.offload_optimizer",
    "training.seed",
    "task.kind",
    "task.held_out_share",
    "algorithm.name",
    "output.directory",
    "output.name",
)
"""The saved state would not fit, or held-out problems would have been trained on."""


def verdict(path: str) -> str:
    """'free', 'flag' or 'refused' for an option."""
    if any(fnmatchcase(path, pattern) for pattern in REFUSED):
        return "refused"
    return "free" if any(fnmatchcase(path, pattern) for pattern in FREE) else "flag"


def check(before: Resolved, after: Resolved, allowed: bool) -> list[str]:
    """A sentence for each change; ValueError where one is refused or lacks the flag."""
    old, new = before.values, after.values
    sentences, faults = [], []
    for path in sorted({*old, *new}):
        if old.get(path) == new.get(path):
            continue
        change = f"{path} = {new.get(path)!r} (was {old.get(path)!r})"
        kind = verdict(path)
        if path == "training.steps" and after.config.training.schedule != "constant":
            kind = "flag"  # a falling schedule is stretched over the steps
        if kind == "refused":
            faults.append(f"{change} cannot change in a resumed run; start a new one")
        elif kind == "flag" and not allowed:
            faults.append(f"{change} makes another run of it; add --allow-changes if that is what you want")
        else:
            sentences.append(f"changed: {change}")
    if faults:
        raise InputError("\n".join(faults))
    return sentences
