"""The figures of complete studies that are meant to be quoted, from the content of study.json: means with intervals.

Every interval is Student's t at 95 % over seeds, for one mean alone; the corrected intervals of the registered comparisons
stand in the tables.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from legato.diagnostics.statistics.intervals import wilson_interval
from legato.diagnostics.statistics.paired import mean_interval
from legato.pages.comparison_figures import ARMS, DASHES
from legato.pages.comparison_tables import Results
from legato.pages.traces import Figure, figure

LABELS = {
    "gradient-noise": "variance added by the ratio (doublings)",
    "ratio-bias": "sine of the angle to the exact gradient",
}
"""What the number of a measurement is, short enough for an axis."""


def study_figures(results: Results) -> dict[str, Figure]:
    """Figures by name, for the kind of the study; empty before it is complete."""
    if not results["complete"]:
        return {}
    draw = _frontier if results["endpoint"]["kind"] == "frontier" else _scores
    drawn = (_measurement_figures if results.get("measure") is not None else draw)(results)
    return {name: each for name, each in drawn.items() if each is not None}


def _frontier(results: Results) -> dict[str, Figure | None]:
    """The largest stable value by arm and bed, and the 2 x 2 of unit and band where the arms are named so."""
    axis = results["endpoint"]["axis"]
    values = results["sweep"][axis]
    ticks = {"type": "log", "tickvals": values, "ticktext": [f"{value:g}" for value in values]}
    layout = {"yaxis": {**ticks, "title": {"text": f"largest stable {axis}"}}}
    by_bed = []
    for number, bed in enumerate(results["beds"]):
        arms = [arm for arm in results["arms"] if _frontiers(results, bed, arm)]
        rows = [_frontiers(results, bed, arm) for arm in arms]
        by_bed.append(_points(bed or "all", arms, rows, number, transform=lambda value: 2.0**value, lines=False))
    drawn: dict[str, Figure | None] = {
        "frontier": figure("Largest stable learning rate", _frontier_note(results), by_bed, layout)
    }
    for bed in results["beds"]:
        units = {
            unit: [_frontiers(results, bed, f"{unit}-{band}") for band in ("wide", "narrow")]
            for unit in ("token", "sequence")
        }
        if all(all(rows) for rows in units.values()):
            traces = [
                _points(f"{unit} ratio", ["wide band", "narrow band"], rows, number, transform=lambda value: 2.0**value)
                for number, (unit, rows) in enumerate(units.items())
            ]
            title = f"Unit of the ratio and width of the band{f', {bed}' if bed else ''}"
            drawn[f"unit-and-band{f'-{bed}' if bed else ''}"] = figure(title, _frontier_note(results), traces, layout)
    return drawn


def _frontier_note(results: Results) -> str:
    seeds = len(results["seeds"])
    return f"Geometric mean over {seeds} seeds with 95 % intervals; a seed beyond the sweep counts with its edge."


def _frontiers(results: Results, bed: str, arm: str) -> list[float]:
    """log2 of the frontier of each seed; half the least value where nothing survived."""
    axis = results["endpoint"]["axis"]
    frontiers = []
    for seed in results["seeds"]:
        runs = [run for run in results["runs"] if (run["bed"], run["arm"], run["seed"]) == (bed, arm, seed)]
        if not runs:
            return []
        edge = min(run["point"][axis] for run in runs) / 2
        for run in sorted(runs, key=lambda run: run["point"][axis]):
            if run["status"] != "done":
                break
            edge = run["point"][axis]
        frontiers.append(math.log2(edge))
    return frontiers


def _scores(results: Results) -> dict[str, Figure | None]:
    """Accuracy at the end: by the swept value (or the experts that flipped, where these were recorded), or by arm."""
    axes = [axis for axis, values in results["sweep"].items() if all(isinstance(value, int | float) for value in values)]
    accuracy = {"tickformat": ".0%", "title": {"text": "held-out accuracy at the end"}}
    note = f"Mean over {len(results['seeds'])} seeds with 95 % intervals."
    if not axes:
        arms = list(results["arms"])
        rows = [[run["score"] for run in results["runs"] if run["arm"] == arm] for arm in arms]
        return {
            "accuracy": figure("Accuracy at the end", note, [_points("", arms, rows, 0, lines=False)], {"yaxis": accuracy})
        }
    (axis,) = axes[:1]
    flips = [run.get("flip_mean") for run in results["runs"]]
    shown = "experts that flipped" if axis == "training.router_noise" and all(each is not None for each in flips) else axis
    curves, survival = [], []
    for number, arm in enumerate(results["arms"]):
        at = {
            value: [run for run in results["runs"] if run["arm"] == arm and run["point"][axis] == value]
            for value in results["sweep"][axis]
        }
        if not all(at.values()):
            continue
        places = [
            math.fsum(run["flip_mean"] for run in runs) / len(runs) if shown != axis else value for value, runs in at.items()
        ]
        curves.append(_points(arm, places, [[run["score"] or 0.0 for run in runs] for runs in at.values()], number))
        survival.append(_shares(arm, places, [[run["status"] == "done" for run in runs] for runs in at.values()], number))
    xaxis = {"title": {"text": shown}, **({"tickformat": ".0%"} if shown != axis else {})}
    alive = {"tickformat": ".0%", "range": [-0.02, 1.05], "title": {"text": "runs that survived"}}
    return {
        "accuracy": figure("Accuracy at the end by dose", note, curves, {"xaxis": xaxis, "yaxis": accuracy}),
        "survival": figure("Survival by dose", "Wilson 95 % intervals.", survival, {"xaxis": xaxis, "yaxis": alive}),
    }


def _measurement_figures(results: Results) -> dict[str, Figure | None]:
    """The measured value by the first swept axis, a figure for each value of the second."""
    first, *others = results["sweep"]
    drawn: dict[str, Figure | None] = {}
    for other in results["sweep"][others[0]] if others else [None]:
        traces = []
        for number, arm in enumerate(results["arms"]):
            runs = [run for run in results["runs"] if run["arm"] == arm and (not others or run["point"][others[0]] == other)]
            rows = [[run["value"] for run in runs if run["point"][first] == value] for value in results["sweep"][first]]
            traces.append(_points(arm, list(results["sweep"][first]), rows, number))
        ticks = {"tickvals": results["sweep"][first], "ticktext": [str(value) for value in results["sweep"][first]]}
        layout = {
            "xaxis": {"type": "log", "title": {"text": f"{first} (tokens)" if first == "length" else first}, **ticks},
            "yaxis": {"title": {"text": LABELS.get(results["measure"], results["measure"])}},
        }
        name = "by-length" if other is None else f"by-length-{others[0]}{other:g}"
        title = results["title"] if other is None else f"{results['title']}, {others[0]} {other:g}"
        drawn[name] = figure(title, results["endpoint"]["means"], traces, layout)
    return drawn


def _points(
    name: str,
    places: Sequence[Any],
    rows: Sequence[Sequence[float]],
    number: int,
    *,
    transform: Callable[[float], float] = float,
    lines: bool = True,
) -> dict[str, Any]:
    """A trace of means with their t intervals."""
    middle, above, below = [], [], []
    for values in rows:
        mean = math.fsum(values) / len(values)
        low, high = mean_interval(values) or (mean, mean)
        middle.append(transform(mean))
        above.append(transform(high) - transform(mean))
        below.append(transform(mean) - transform(low))
    return _trace(name, places, middle, above, below, number, lines)


def _shares(name: str, places: Sequence[Any], rows: Sequence[Sequence[bool]], number: int) -> dict[str, Any]:
    """A trace of shares with their Wilson intervals."""
    middle = [sum(row) / len(row) for row in rows]
    ends = [wilson_interval(sum(row), len(row)) for row in rows]
    above = [high - share for (_, high), share in zip(ends, middle, strict=True)]
    below = [share - low for (low, _), share in zip(ends, middle, strict=True)]
    return _trace(name, places, middle, above, below, number, True)


def _trace(
    name: str,
    places: Sequence[Any],
    middle: Sequence[float],
    above: Sequence[float],
    below: Sequence[float],
    number: int,
    lines: bool,
) -> dict[str, Any]:
    colour = ARMS[number % len(ARMS)]
    # Arms that agree would hide each other's intervals: each is moved aside by a hundredth.
    aside = [place * (1 + 0.015 * number) if isinstance(place, int | float) else place for place in places]
    return {
        "type": "scatter",
        "mode": "lines+markers" if lines else "markers",
        "name": name,
        "x": aside,
        "y": list(middle),
        "line": {"color": colour, "width": 2, "dash": DASHES[number % len(DASHES)]},
        "marker": {"color": colour, "size": 9},
        "error_y": {"type": "data", "symmetric": False, "array": list(above), "arrayminus": list(below)},
    }
