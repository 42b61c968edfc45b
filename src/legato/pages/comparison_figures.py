"""The figures of a comparison: curves of arms with bands over seeds, final scores, clipping, cost, stability."""

import html
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from legato.diagnostics.statistics.paired import mean_interval, share_interval
from legato.diagnostics.statistics.seeds import mean
from legato.pages.comparison_tables import Results, label
from legato.pages.curves import round_six, thin
from legato.pages.legible import legible
from legato.pages.traces import AMBER, BLUE, GREEN, RED, VIOLET, Figure, Trace, axis, band, figure, line, shares

ARMS = (BLUE, AMBER, GREEN, VIOLET, "#db2777", "#0891b2", "#64748b", "#65a30d")
"""One colour per arm; red is for what broke."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
BANDS = 60
"""Most points of a curve over seeds: a page of many runs stays small."""

Run = Mapping[str, Any]


def figures(results: Results) -> list[Figure]:
    """Return all figures that the finished runs allow."""
    colours = dict(zip(results["arms"], cycle(ARMS), strict=False))
    drawn = _stability(results, colours)
    for point in results["points"]:
        here = [run for run in results["runs"] if run["point"] == point["point"]]
        at = f", {label(point['point'])}" if point["point"] else ""
        drawn += [learning(here, colours, at, wide=not at), _clipping(here, colours, at)]
    drawn += [_final(results, colours), _cost(results)]
    return [each for each in drawn if each is not None]


def learning(runs: Sequence[Run], colours: Mapping[str, str], at: str, *, wide: bool) -> Figure | None:
    data: list[Trace] = []
    steps = sorted({each["step"] for run in runs for each in run["evaluations"]})
    for arm, colour in colours.items():
        data += over_seeds([_course(run, steps) for run in runs if run["arm"] == arm], arm, colour, of_shares=True)
    caption = "Sampled accuracy on held-out problems: mean and 95 % interval over seeds. A failed run stays where it was."
    return figure(f"Learning{at}", caption, data, shares("accuracy"), wide=wide, keys=["eval/accuracy_sampled"])


def _course(run: Run, steps: Sequence[int]) -> dict[float, float]:
    """Return accuracy by step. A failed run keeps its last score: a mean over the other seeds would flatter its arm."""
    course = {each["step"]: each["sampled"] for each in run["evaluations"]}
    if run["status"] in ("failed", "unhealthy") and run["score"] is not None:
        last = max(course, default=-1)
        course |= {step: run["score"] for step in steps if step > last}
    return course


def _clipping(runs: Sequence[Run], colours: Mapping[str, str], at: str) -> Figure | None:
    data: list[Trace] = []
    for arm, colour in colours.items():
        data += over_seeds([dict(run["clip"]) for run in runs if run["arm"] == arm], arm, colour, of_shares=True)
    caption = "Share of tokens that the trust region left without a gradient: mean and 95 % interval over seeds."
    return figure(f"Clipped tokens{at}", caption, data, shares("share of tokens", whole=False), keys=["clip/tokens"])


def over_seeds(
    courses: Sequence[Mapping[float, float]], name: str, colour: str, last: float | None = None, *, of_shares: bool = False
) -> list[Trace]:
    """Return traces of the mean and its interval over seeds, at each step over the seeds that have it.

    `last` is the last step of the arm, if other figures may know later steps than these courses. `of_shares`: the values are
    shares, so that no interval leaves 0 to 1.
    """
    steps = sorted({step for course in courses for step in course})
    steps = [steps[index] for index in thin(len(steps), BANDS)]
    values = {step: [course[step] for course in courses if step in course] for step in steps}
    x = [float(step) for step in steps]
    label_text = _safe(name)
    average = line(x, [round_six(mean(values[step])) for step in steps], label_text, colour)
    around = {step: (share_interval if of_shares else mean_interval)(values[step]) for step in steps}
    if not steps:
        return []
    low = [round_six(mean(values[step]) if (ends := around[step]) is None else ends[0]) for step in steps]
    high = [round_six(mean(values[step]) if (ends := around[step]) is None else ends[1]) for step in steps]
    meta = {"meta": {"last": x[-1] if last is None else last}}
    if low == high:
        return [average | meta]
    group = {"legendgroup": label_text, **meta}
    return [*(trace | group | {"showlegend": False} for trace in band(x, low, high, label_text, colour)), average | group]


def _final(results: Results, colours: Mapping[str, str]) -> Figure | None:
    if len(results["points"]) > 1 or not results["points"][0]["arms"]:
        return None
    data: list[Trace] = []
    for arm, summary in results["points"][0]["arms"].items():
        runs = [run for run in results["runs"] if run["arm"] == arm and run["seed"] in results["points"][0]["seeds"]]
        broken = [run["status"] != "done" for run in runs]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _safe(arm),
                "showlegend": False,
                "x": [_safe(arm)] * len(runs),
                "y": [round_six(run["score"]) for run in runs],
                "text": [f"seed {run['seed']}: {run['status']}" for run in runs],
                "marker": {
                    "color": [RED if each else colours[arm] for each in broken],
                    "symbol": ["x" if each else "circle-open" for each in broken],
                    "size": 9,
                    "line": {"width": 2},
                },
            }
        )
        data.append(
            _bar([_safe(arm)], [summary["mean"]], [summary["mean_interval"]], f"{arm}, mean", colours[arm], "diamond")
        )
        data[-1]["showlegend"] = False
    caption = "Each seed, and the mean with its 95 % interval. Red cross: collapsed or failed."
    layout = shares("accuracy") | {"xaxis": {"title": {"text": ""}, "type": "category"}, "hovermode": "closest"}
    return figure("Held-out accuracy at the end", caption, data, layout)


def _bar(
    x: Sequence[Any], y: Sequence[float], around: Sequence[Sequence[float] | None], name: str, colour: str, symbol: str
) -> Trace:
    """Return markers with their intervals."""
    ends = [(value, value) if each is None else each for value, each in zip(y, around, strict=True)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": _safe(name),
        "x": list(x),
        "y": [round_six(value) for value in y],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [round_six(max(0.0, high - value)) for value, (_, high) in zip(y, ends, strict=True)],
            "arrayminus": [round_six(max(0.0, value - low)) for value, (low, _) in zip(y, ends, strict=True)],
            "thickness": 1.6,
            "width": 6,
        },
        "marker": {"color": colour, "size": 11, "symbol": symbol},
    }


def _cost(results: Results) -> Figure | None:
    first = next((point for point in results["points"] if point["arms"]), None)
    if first is None:
        return None
    at = f", {label(first['point'])}" if first["point"] else ""
    phases = {arm: summary["phases"] for arm, summary in first["arms"].items()}
    return cost_bars(phases, f"Cost{at}", "Seconds spent in the steps of a run, mean over seeds.", "seconds of a run")


def cost_bars(phases: Mapping[str, Mapping[str, float]], title: str, caption: str, unit: str) -> Figure | None:
    """Draw the seconds of each arm by phase."""
    data: list[Trace] = [
        {
            "type": "bar",
            "name": phase,
            "x": [_safe(arm) for arm in phases],
            "y": [round_six(seconds[phase]) for seconds in phases.values()],
            "marker": {"color": colour, "line": {"width": 0}},
        }
        for phase, colour in (("rollouts", BLUE), ("anchor", VIOLET), ("update", AMBER))
    ]
    layout = axis(unit, least=0) | {"barmode": "stack", "xaxis": {"title": {"text": ""}, "type": "category"}}
    return figure(title, caption, data, layout)


def swept_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Return an axis with labels at the values of a sweep; logarithmic if they are above 0 and far apart."""
    ticks = sorted(set(values))
    kind = "log" if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0] else "linear"
    labels = {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{value:g}" for value in ticks]}
    return {"title": {"text": title}, "type": kind, **labels}


def _stability(results: Results, colours: Mapping[str, str]) -> list[Figure | None]:
    drawn_figures: list[Figure | None] = []
    for swept in dict.fromkeys(each["axis"] for each in results["frontier"]):
        data: list[Trace] = []
        mine = [each for each in results["frontier"] if each["axis"] == swept]
        others = list(dict.fromkeys(label(each["others"]) for each in mine))
        for each in mine:
            scale = [row for row in each["scale"] if row["mean"] is not None]
            if not scale:
                continue
            rest = label(each["others"])
            name = _safe(f"{each['arm']}, {rest}" if rest else each["arm"])
            trace = _bar(
                [row["value"] for row in scale],
                [row["mean"] for row in scale],
                [row["interval"] for row in scale],
                name,
                colours[each["arm"]],
                "circle",
            )
            symbols = ["x" if row["broken"] else "circle" for row in scale]
            marks = [RED if row["broken"] else colours[each["arm"]] for row in scale]
            dash = DASHES[others.index(rest) % len(DASHES)]
            drawn = {"color": colours[each["arm"]], "width": 2, "dash": dash}
            data.append(
                trace | {"mode": "lines+markers", "line": drawn, "marker": {"color": marks, "symbol": symbols, "size": 10}}
            )
        values = [row["value"] for each in mine for row in each["scale"]]
        layout = shares("accuracy at the end") | {"xaxis": swept_axis(swept, values)}
        caption = "Final accuracy, mean over seeds with 95 % intervals. A red cross: at least one seed collapsed or failed."
        drawn_figures.append(figure(f"Stability over {swept}", caption, data, layout, wide=True))
    return drawn_figures


def _safe(text: str) -> str:
    """Escape a name: Plotly reads tags in names."""
    return html.escape(legible(text, one_line=True))
