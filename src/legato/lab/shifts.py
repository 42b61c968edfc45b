"""Large policy shifts on a real policy: ten times the learning rate, or many updates a step, beside normal training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.config.resolved import Resolved
from legato.diagnostics.gaps import effective_share
from legato.lab.recorder import ObservedUpdate, Say, UpdateRecorder, recorder_of
from legato.policy.policy import Policy
from legato.run.mismatch import restoring_weights

FASTER, MANY = 10.0, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """How far the policy had moved at one update of a step, over several steps."""

    index: int
    responses: int
    mean: float
    """Of s."""
    deviation: float
    """Of log s."""
    effective: float
    """ESS / N of s as weights."""
    clipped: float
    """Among responses with an advantage."""


def movements(observed: Sequence[ObservedUpdate]) -> list[Movement]:
    """Summarise the movement by update within the step. At the first update nothing has moved."""
    by_update = []
    for index in sorted({each.index for each in observed}):
        updates = [each for each in observed if each.index == index]
        log_s = torch.cat([each.log_s for each in updates])
        by_update.append(
            Movement(
                index=index,
                responses=len(log_s),
                mean=float(log_s.exp().mean()),
                deviation=float(log_s.std(correction=0)),
                effective=effective_share(log_s.exp()),
                clipped=clipped_share(updates),
            )
        )
    return by_update


def clipped_share(observed: Sequence[ObservedUpdate]) -> float:
    """Return the share of responses clipped as a whole, among those with an advantage."""
    counted = torch.cat([each.advantages != 0 for each in observed])
    clipped: Tensor = torch.cat([each.clipped for each in observed])
    return float(clipped[counted].double().mean()) if bool(counted.any()) else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The result of one way to train."""

    name: str
    changes: Mapping[str, Any]
    observed: tuple[ObservedUpdate, ...]
    updates: tuple[Movement, ...]
    rewards: tuple[float, ...]


def shifts(resolved: Resolved, policy: Policy, source: Any, *, steps: int, say: Say) -> list[Shift]:
    """Train each way from the same weights on the same problems; the weights are restored afterwards."""
    training = resolved.config.training
    # Whole groups are dealt to updates: as many updates need as many prompts.
    prompts = max(training.prompts_per_step, MANY)
    ways: dict[str, dict[str, Any]] = {
        "as configured": {},
        f"lr x {FASTER:g}": {"lr": FASTER * training.lr},
        f"{MANY} updates a step": {"updates_per_step": MANY},
    }
    results = []
    for name, changes in ways.items():
        say(f"{name}, {steps} steps of {prompts} prompts")
        recorder: UpdateRecorder = recorder_of(resolved, policy, source, steps=steps, prompts_per_step=prompts, **changes)
        with restoring_weights(policy):
            rewards = [recorder.step().metrics.get("reward/mean", float("nan")) for _ in range(steps)]
        results.append(
            Shift(
                name=name,
                changes=changes,
                observed=tuple(recorder.observed),
                updates=tuple(movements(recorder.observed)),
                rewards=tuple(rewards),
            )
        )
    return results
