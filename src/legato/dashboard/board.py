"""The data behind the dashboard's views of several runs: curves, findings, and differences of their configs."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from legato.dashboard.runs import Folder, Run
from legato.dashboard.series import Series
from legato.diagnostics.metrics.titles import metric_title
from legato.diagnostics.statistics.seeds import mean
from legato.health.rule import LEVELS
from legato.health.rules import RULES
from legato.pages.curves import round_six
from legato.pages.health import group_equal
from legato.pages.legible import legible
from legato.pages.several import arms

_MOST_VALUES = 40_000
"""Most points of all curves of an answer together: with two hundred curves, fewer points each are enough."""


def curves(folder: Folder, names: Sequence[str], keys: Sequence[str], points: int, join: bool) -> dict[str, Any]:
    """Return the curves of `keys`, and all recorded keys with their titles.

    With `join`, runs that differ only in the seed become one curve with a band.
    """
    runs = [folder.run(name) for name in names]
    series_by_run = {run.name: run.series_to_draw() for run in runs}
    folder.read_in_background()
    points = max(20, min(points, _MOST_VALUES // max(1, len(runs) * len(keys))))
    keys_recorded = sorted({key for series in series_by_run.values() for each in series.values() for key in each.keys})
    drawn_curves = (
        _joined_curves(runs, series_by_run, keys, points) if join else _separate_curves(runs, series_by_run, keys, points)
    )
    return {
        "keys": keys_recorded,
        "titles": {key: legible(metric_title(key), one_line=True) for key in keys_recorded},
        "curves": drawn_curves,
        "reading": [run.name for run in runs if run.first_look is not None or run.behind],
        "damaged": {run.name: run.damaged for run in runs if run.damaged},
    }


def _separate_curves(
    runs: Sequence[Run], series_by_run: Mapping[str, Mapping[str, Series]], keys: Sequence[str], points: int
) -> list[dict[str, Any]]:
    result = []
    for run in runs:
        with run.lock:
            result += [
                {"key": key, "run": run.name, "name": legible(run.name, one_line=True), **curve}
                for key in keys
                if (curve := _curve(series_by_run[run.name], key, points)) is not None
            ]
    return result


def _curve(series: Mapping[str, Series], key: str, points: int) -> dict[str, Any] | None:
    """Return the curve of a key with "last", the last step of its run: the end of an axis of shares."""
    last = max(series[kind].last_step for kind in ("step", "evaluation"))
    for kind, each in series.items():
        if (curve := each.curve(key, points)) is not None:
            return {**curve, "last": each.last_step if kind == "warm-up" else last}
    return None


def _joined_curves(
    runs: Sequence[Run], series_by_run: Mapping[str, Mapping[str, Series]], keys: Sequence[str], points: int
) -> list[dict[str, Any]]:
    """Return mean, minimum and maximum over the seeds of each arm, at steps that all seeds have reached."""
    by_name = {run.name: run for run in runs}
    runs_by_arm = arms({run.name: run.options() for run in runs})
    result = []
    for arm, names in runs_by_arm.items():
        members = [by_name[name] for name in names]
        for key in keys:
            each = [curve for run in members if (curve := _curve(series_by_run[run.name], key, min(points, 60))) is not None]
            if each:
                name = members[0].name if len(members) == 1 else f"{arm}, {len(members)} seeds"
                result.append({"key": key, "run": members[0].name, "name": legible(name, one_line=True), **_band(each)})
    return result


def _band(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(each) == 1:
        return dict(each[0])
    first, last = max(curve["x"][0] for curve in each), min(curve["x"][-1] for curve in each)
    grid = [x for x in each[0]["x"] if first <= x <= last] or [first]
    values = numpy.array([numpy.interp(grid, curve["x"], curve["mean"]) for curve in each]).T.tolist()
    return {
        "x": grid,
        "mean": [round_six(mean(row)) for row in values],
        "low": [round_six(min(row)) for row in values],
        "high": [round_six(max(row)) for row in values],
        "breaks": [],
        "last": min(curve["last"] for curve in each),
    }


def findings(folder: Folder, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the findings of these runs with causes and advice from their rules, gravest first, then newest.

    Equal findings of a run are one, with all its "steps".
    """
    rules = {rule.name: rule for rule in RULES}
    rows = list[dict[str, Any]]()
    for run in map(folder.run, names):
        command = f"legato doctor {shlex.quote(legible(str(run.directory.path), one_line=True))}"
        for each in group_equal(run.read_health()):
            # A recovery names the rule of its finding too; causes are listed with the finding only.
            rule = None if each["what"] == "recovery" else rules.get(each["rule"])
            causes, tries = ((), ()) if rule is None else (rule.causes, rule.tries)
            rows.append(each | {"run": run.name, "doctor": command, "causes": causes, "tries": tries})
    return sorted(rows, key=lambda each: (-LEVELS.index(each["level"]), -each["step"]))


def configs(folder: Folder, names: Sequence[str]) -> dict[str, Any]:
    """Return the options in which runs differ, and those that are the same in all."""
    by_name = {name: folder.run(name).options() for name in names}
    paths = sorted({path for options in by_name.values() for path in options})
    rows = [{"path": path, "values": [_value(by_name[name], path) for name in names]} for path in paths]
    differ = [row for row in rows if len(set(row["values"])) > 1]
    return {"runs": list(names), "differ": differ, "same": [row for row in rows if row not in differ]}


def _value(options: Mapping[str, Any], path: str) -> str | None:
    return legible(str(options[path]), one_line=True) if path in options else None
