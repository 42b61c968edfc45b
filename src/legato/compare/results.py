"""The content of compare.json, from which tables and page are made."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from legato.compare.analysis import share_variance
from legato.compare.definition import Definition
from legato.compare.jobs import Job, points
from legato.compare.outcomes import COUNTED, outcomes
from legato.compare.processes import Machine
from legato.compare.store import FORMAT, Store
from legato.diagnostics.collapse import DEFINITION
from legato.diagnostics.statistics.paired import ERROR_RATE, compare_pairs, share_interval
from legato.diagnostics.statistics.seeds import difference, interquartile_mean, mean, probability_of_improvement

Outcome = Mapping[str, Any]

FAILURES = (
    "A failed run (its process ended with an error, or its state was no longer finite) counts with the last held-out"
    " accuracy it measured, or 0 if it measured none. One for which a disk or a GPU had no room does not count until it was"
    " run again. A collapsed run counts with where it ended."
)


def collect(
    definition: Definition, planned: Sequence[Job], store: Store, machine: Machine, unequal: Sequence[str]
) -> dict[str, Any]:
    """Return the content of compare.json. Unfinished runs are listed but not counted."""
    runs = outcomes(planned, store)
    first = next(iter(definition.arms))
    config = planned[0].resolved.config
    return {
        "format": FORMAT,
        "name": store.path.resolve().name,
        "recipes": [str(path) for path in definition.recipes],
        "model": config.policy.model,
        "task": config.task.kind,
        "arms": list(definition.arms),
        "against": first,
        "changes": {arm: {path: options[path] for path in sorted(options)} for arm, options in definition.arms.items()},
        "seeds": list(definition.seeds),
        "sweep": {path: list(values) for path, values in definition.sweep.items()},
        "unequal": list(unequal),
        "machine": {"parallel": machine.parallel, "threads": machine.threads, "gpus": list(machine.gpus)},
        "definitions": {"collapse": DEFINITION, "failure": FAILURES},
        "points": summarise_points(list(definition.arms), definition.seeds, points(definition), runs),
        "frontier": [each for axis in definition.sweep for each in _frontier(axis, definition, runs)],
        "runs": runs,
    }


def summarise_points(
    arms: Sequence[str], seeds: Sequence[int], swept: Sequence[Mapping[str, Any]], runs: Sequence[Outcome]
) -> list[dict[str, Any]]:
    """Means, intervals and comparisons with the first arm, at every point of the sweep."""
    comparisons = max(1, (len(arms) - 1) * len(swept))
    return [_point(point, arms, seeds, comparisons, runs) for point in swept]


def _point(
    point: Mapping[str, Any], arms: Sequence[str], wanted: Sequence[int], comparisons: int, runs: Sequence[Outcome]
) -> dict[str, Any]:
    here = [run for run in runs if run["point"] == point and run["status"] in COUNTED]
    by_arm = {arm: {run["seed"]: run for run in here if run["arm"] == arm} for arm in arms}
    # Paired: a seed counts once every arm has finished it.
    seeds = [seed for seed in wanted if all(seed in by_arm[arm] for arm in arms)]
    scores = {arm: [by_arm[arm][seed]["score"] for seed in seeds] for arm in arms}
    first = arms[0]
    return {
        "point": dict(point),
        "seeds": seeds,
        "arms": {arm: _arm([by_arm[arm][seed] for seed in seeds], scores[arm]) for arm in arms} if seeds else {},
        "pairs": {
            arm: compare_arms([by_arm[arm][seed] for seed in seeds], [by_arm[first][seed] for seed in seeds], comparisons)
            for arm in arms
            if arm != first and seeds
        },
    }


def _arm(runs: Sequence[Outcome], scores: Sequence[float]) -> dict[str, Any]:
    known = {
        key: [run[key] for run in runs if run[key] is not None]
        for key in ("greedy", "start", "best", "clip_mean", "flip_mean", "updates", "tokens", "seconds", "steps")
    }
    return {
        "scores": list(scores),
        "mean": mean(scores),
        "mean_interval": share_interval(scores),
        "iqm": interquartile_mean(scores),
        "iqm_interval": None,  # no interval of it holds what it says over few seeds
        "collapsed": sum(run["status"] == "collapsed" for run in runs),
        "failed": sum(run["status"] in ("failed", "unhealthy") for run in runs),
        **{key: mean(values) if values else None for key, values in known.items()},
        "phases": {phase: mean([run["phases"][phase] for run in runs]) for phase in runs[0]["phases"]},
    }


def compare_arms(runs: Sequence[Outcome], others: Sequence[Outcome], comparisons: int) -> dict[str, Any]:
    """An arm beside the first one, by the statistics of a study: paired over seeds, corrected for the number of pairs."""
    scores, against = [run["score"] for run in runs], [run["score"] for run in others]
    apart = [one - other for one, other in zip(scores, against, strict=True)]
    variances = [share_variance(run["score"], run.get("problems")) for run in (*runs, *others)]
    paired = None
    if len(apart) > 1:
        floor = math.sqrt(math.fsum(variances) / len(apart))
        paired = compare_pairs(apart, comparisons=comparisons, margin=0.0, floor=floor)
    return {
        "difference": difference(scores, against),
        "difference_interval": None if paired is None else (max(-1.0, paired.low), min(1.0, paired.high)),
        "level": 1 - ERROR_RATE / comparisons,
        "comparisons": comparisons,
        "probability": probability_of_improvement(scores, against),
        "probability_interval": None,
        "better": sum(each > 0 for each in apart),
        "worse": sum(each < 0 for each in apart),
    }


def _frontier(axis: str, definition: Definition, runs: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Per arm and combination of the other axes: the largest value up to which no seed collapsed or failed."""
    values = definition.sweep[axis]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return []
    others = {repr(_without(point, axis)): _without(point, axis) for point in points(definition)}.values()
    frontier = []
    for arm in definition.arms:
        for rest in others:
            here = [
                run
                for run in runs
                if run["arm"] == arm and run["status"] in COUNTED and _without(run["point"], axis) == rest
            ]
            scale = {value: [run for run in here if run["point"][axis] == value] for value in sorted(values)}
            frontier.append({"arm": arm, "axis": axis, "others": rest, **_edge(scale)})
    return frontier


def _without(point: Mapping[str, Any], axis: str) -> dict[str, Any]:
    return {path: value for path, value in point.items() if path != axis}


def _edge(scale: Mapping[float, Sequence[Outcome]]) -> dict[str, Any]:
    """Where stability ends on an ascending scale: beyond the first value that breaks, a lucky one is not stable."""
    rows = [
        {
            "value": value,
            "seeds": len(runs),
            "broken": sum(run["status"] != "done" for run in runs),
            "mean": mean([run["score"] for run in runs]) if runs else None,
            "interval": share_interval([run["score"] for run in runs]),
        }
        for value, runs in scale.items()
    ]
    largest = breaks = None
    for row in rows:
        if row["broken"]:
            breaks = row["value"]
            break
        if not row["seeds"]:
            break  # not known yet
        largest = row["value"]
    return {"largest": largest, "breaks": breaks, "scale": rows}
