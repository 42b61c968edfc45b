"""The content of compare.json, from which tables and page are made."""

from collections.abc import Mapping, Sequence
from typing import Any

from legato.compare.definition import Definition
from legato.compare.jobs import Job, points
from legato.compare.outcomes import COUNTED, outcomes
from legato.compare.processes import Machine
from legato.compare.store import FORMAT, Store
from legato.diagnostics.collapse import DEFINITION
from legato.diagnostics.statistics.seeds import difference, interquartile_mean, interval, mean, probability_of_improvement

Outcome = Mapping[str, Any]

FAILURES = (
    "A failed run (its process ended with an error, or its state was no longer finite) counts with the last held-out"
    " accuracy it measured, or 0 if it measured none. A collapsed run counts with where it ended."
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
        "points": [_point(point, definition, runs) for point in points(definition)],
        "frontier": [each for axis in definition.sweep for each in _frontier(axis, definition, runs)],
        "runs": runs,
    }


def _point(point: Mapping[str, Any], definition: Definition, runs: Sequence[Outcome]) -> dict[str, Any]:
    here = [run for run in runs if run["point"] == point and run["status"] in COUNTED]
    by_arm = {arm: {run["seed"]: run for run in here if run["arm"] == arm} for arm in definition.arms}
    # Paired: a seed counts once every arm has finished it.
    seeds = [seed for seed in definition.seeds if all(seed in by_arm[arm] for arm in definition.arms)]
    scores = {arm: [by_arm[arm][seed]["score"] for seed in seeds] for arm in definition.arms}
    first = next(iter(definition.arms))
    return {
        "point": dict(point),
        "seeds": seeds,
        "arms": {arm: _arm([by_arm[arm][seed] for seed in seeds], scores[arm]) for arm in definition.arms} if seeds else {},
        "pairs": {arm: _pair(scores[arm], scores[first]) for arm in definition.arms if arm != first} if seeds else {},
    }


def _arm(runs: Sequence[Outcome], scores: Sequence[float]) -> dict[str, Any]:
    known = {
        key: [run[key] for run in runs if run[key] is not None]
        for key in ("greedy", "start", "best", "clip_mean", "flip_mean", "updates", "tokens", "seconds", "steps")
    }
    return {
        "scores": list(scores),
        "mean": mean(scores),
        "mean_interval": interval(mean, scores),
        "iqm": interquartile_mean(scores),
        "iqm_interval": interval(interquartile_mean, scores),
        "collapsed": sum(run["status"] == "collapsed" for run in runs),
        "failed": sum(run["status"] in ("failed", "unhealthy") for run in runs),
        **{key: mean(values) if values else None for key, values in known.items()},
        "phases": {phase: mean([run["phases"][phase] for run in runs]) for phase in runs[0]["phases"]},
    }


def _pair(scores: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    both = list(zip(scores, others, strict=True))
    return {
        "difference": difference(scores, others),
        "difference_interval": interval(difference, scores, others),
        "probability": probability_of_improvement(scores, others),
        "probability_interval": interval(probability_of_improvement, scores, others),
        "better": sum(one > other for one, other in both),
        "worse": sum(one < other for one, other in both),
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
            "interval": interval(mean, [run["score"] for run in runs]) if runs else None,
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
