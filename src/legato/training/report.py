"""The report of a step: its metrics, and the sums they come from."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from legato.core.rollout import Group
from legato.core.sums import Histogram, Sums, Total
from legato.core.world import OneProcess, World
from legato.objectives.slots import State
from legato.training.probe import Floor
from legato.training.source import Tally
from legato.training.update import Report

PER_UPDATE = (
    "clip/sequences",
    "clip/tokens",
    "clip/outside_sequences",
    "clip/beyond_positive",
    "clip/beyond_negative",
    "ratio/sequence_mean",
    "ratio/sequence_std",
    "ratio/sequence_max",
    "loss/total",
    "router/flip_mean",
    "router/shift_mean",
)
"""Metrics that are also recorded of each update of a step, as `key@k`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The metrics, rollouts and sums of a step."""

    step: int
    metrics: Mapping[str, float]
    groups: tuple[Group, ...]
    floor: Floor | None
    """The noise floor, if this step measured it."""
    unscorable: Mapping[str, int]
    """How often each reason occurred."""
    sums: Sums = field(default_factory=Sums)
    """The sums from which the metrics of the updates were computed."""
    details: tuple[dict[str, Any], ...] = ()
    """Details of each rollout in `groups` if `Trainer.step` was called with `detailed` (`details.py`)."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tables the updates read, a row per rollout; some on the device."""

    def histograms(self) -> dict[str, dict[str, list[float]]]:
        """Edges and counts of every quantity that has a distribution."""
        return {key: piece.bars() for key, piece in self.sums.items() if isinstance(piece, Histogram)}


class Clock:
    """Seconds of the phases of a step."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Record the seconds since the last call as those of this phase."""
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNumbers:
    """The report of an update with its device numbers on the host."""

    report: Report
    without_gradient: int
    savable: float
    """The share of the computed tokens that were responses of rows without a gradient."""
    norm: float
    """Of the gradient, before it was clipped."""


def fetch_numbers(updates: Sequence[tuple[Report, torch.Tensor]], world: World | None = None) -> list[UpdateNumbers]:
    """The numbers of a step's updates, from (report, gradient norm) of each. The host waits here, once a step."""
    world = OneProcess() if world is None else world
    numbers = torch.stack(
        [torch.stack([r.without_gradient.to(norm), r.savable.to(norm), norm]) for r, norm in updates]
    ).cpu()
    # These add up over ranks. The norm is of the whole gradient already.
    counts = world.sum_table(numbers[:, :2])
    return [
        UpdateNumbers(report=report, without_gradient=int(dead), savable=savable / max(1, report.tokens_read), norm=norm)
        for (report, _), (dead, savable), norm in zip(updates, counts.tolist(), numbers[:, 2].tolist(), strict=True)
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def rollout_metrics(tally: Tally) -> dict[str, float]:
    """Metrics of everything that was sampled, dropped groups included."""
    mean = _mean(tally.rewards)
    lengths = [float(length) for length in tally.lengths]
    metrics = {
        "reward/mean": mean,
        "reward/deviation": math.sqrt(_mean([(r - mean) ** 2 for r in tally.rewards])) if tally.rewards else math.nan,
        "accuracy/mean": _mean(tally.accuracy),
        "length/mean": _mean(lengths),
        "length/max": max(lengths, default=math.nan),
        "length/truncated": tally.truncated / max(1, len(lengths)),
        "groups/zero_variance": tally.flat / max(1, tally.groups),
        "groups/all_right": tally.all_right / max(1, tally.groups),
        "groups/all_wrong": tally.all_wrong / max(1, tally.groups),
        "groups/rounds": float(tally.rounds),
        "groups/too_few_scored": float(tally.too_few),
        "rollouts/unscorable": tally.unscorable / max(1, tally.rollouts),
        "prompts/too_long": float(tally.too_long),
        "tokens/response": sum(lengths),
    }
    return metrics | {f"reward/{name}": _mean(values) for name, values in tally.components.items()} | tally.sampler


def update_metrics(sums: Sums, own: Sequence[Sums], updates: Sequence[UpdateNumbers], lr: float) -> dict[str, float]:
    """Metrics of the updates: over all of them (`sums`), and of update k of the step as `key@k`, from its `own` sums.

    k counts through the epochs: only @0 is of a policy that no update has moved yet. The health watch relies on this.
    """
    metrics = _per_update(sums, len(updates))
    for number, pieces in enumerate(own):
        values = _per_update(pieces, 1)
        metrics |= {f"{key}@{number}": values[key] for key in PER_UPDATE if key in values}
    reports, finite = [update.report for update in updates], [u.norm for u in updates if math.isfinite(u.norm)]
    rows = sum(report.rows for report in reports)
    skipped = sum(u.report.silent + (u.without_gradient if u.report.passes == 2 else 0) for u in updates)
    return metrics | {
        "gradient/norm": _mean(finite),
        "gradient/norm_max": max(finite, default=math.nan),
        "optimizer/lr": lr,
        "update/applied": len(finite) / len(updates),
        "update/silent_rows": sum(report.silent for report in reports) / rows,
        "update/skipped_rows": skipped / rows,
        "update/two_pass": sum(report.passes == 2 for report in reports) / len(reports),
    }


def _per_update(sums: Sums, updates: int) -> dict[str, float]:
    """The sums as numbers. Totals are divided by the number of updates."""
    totals = {key for key, piece in sums.items() if isinstance(piece, Total)}
    return {key: value / updates if key in totals else value for key, value in sums.report().items()}


def time_metrics(seconds: Mapping[str, float], tally: Tally) -> dict[str, float]:
    """Seconds of each phase of a step, and response tokens a second over the whole step."""
    total = sum(seconds.values())
    phases = {f"time/{name}_seconds": value for name, value in seconds.items()}
    return phases | {"time/step_seconds": total, "tokens/per_second": sum(tally.lengths) / total if total else math.nan}


def read_state(state: State) -> dict[str, dict[str, float]]:
    """The state of adaptive parts as floats. Tensors are float64 too, so nothing is rounded."""
    return {name: {key: float(value) for key, value in values.items()} for name, values in state.items()}


def state_metrics(state: State) -> dict[str, float]:
    """The state of adaptive parts after the step, as metrics."""
    return {f"state/{name}.{key}": value for name, values in read_state(state).items() for key, value in values.items()}
