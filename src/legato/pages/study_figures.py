"""The figures of complete studies that are meant to be quoted, from the content of study.json: means with intervals.

Every interval is Student's t at 95 % over seeds, for one mean alone; the corrected intervals of the registered comparisons
stand in the tables.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legato.diagnostics.statistics.frontier import frontier
from legato.diagnostics.statistics.intervals import wilson_interval
from legato.diagnostics.statistics.paired import mean_interval, share_interval
from legato.pages.comparison_figures import ARMS, DASHES
from legato.pages.comparison_tables import Results
from legato.pages.traces import Figure, Trace, figure

LABELS = {
    "gradient-noise": "variance added by the ratio (doublings)",
    "ratio-bias": "sine of the angle to the exact gradient",
}
"""What the number of a measurement is, short enough for an axis."""
AXES = {"training.lr": "learning rate", "training.router_noise": "noise on the routers", "length": "tokens of a response"}
"""Swept options in words."""
ROLES = {"token-wide": "GRPO", "sequence-narrow": "GSPO"}
"""The corners of the 2 x 2 of unit and band that are published algorithms, with their published bands."""
_ACCURACY = {"tickformat": ".0%", "title": {"text": "held-out accuracy at the end"}}


def study_figures(results: Results) -> dict[str, Figure]:
    """Figures by name, for the kind of the study; empty before it is complete."""
    if not results["complete"]:
        return {}
    kinds: Mapping[str, Callable[[Results], dict[str, Figure | None]]] = {
        "frontier": _frontier,
        "measured": _measurement_figures,
        "area": lambda results: {**_curves(results), **_scores(results)},
    }
    drawn = kinds.get(results["endpoint"]["kind"], _scores)(results)
    return {name: each for name, each in drawn.items() if each is not None}


# Frontiers


def _frontier(results: Results) -> dict[str, Figure | None]:
    """The largest stable value by arm and bed, the 2 x 2 of unit and band where the arms are named so, and accuracies."""
    axis, beds = results["endpoint"]["axis"], list(results["beds"])
    name = f"largest stable {AXES.get(axis, axis)}"
    arms = list(results["arms"])
    traces = [
        trace
        for number, bed in enumerate(beds)
        for trace in _frontier_traces(results, bed, bed, dict(enumerate(arms)), number, len(beds))
    ]
    layout = _frontier_layout(results, [_label(arm) for arm in arms], name)
    drawn = {"frontier": figure(f"{name.capitalize()} by algorithm", _frontier_note(results), traces, layout)}
    for bed in beds:
        units = {unit: {0: f"{unit}-wide", 1: f"{unit}-narrow"} for unit in ("token", "sequence")}
        if all(_frontiers(results, bed, arm) for places in units.values() for arm in places.values()):
            traces = [
                trace
                for number, (unit, places) in enumerate(units.items())
                for trace in _frontier_traces(results, bed, f"{unit} ratio", places, number, 2, lines=True)
            ]
            title = f"Unit of the ratio and width of the band{f', {bed}' if bed else ''}"
            bands = [f"{width} clip band{_limits(results['arms'][f'token-{width}'])}" for width in ("wide", "narrow")]
            layout = _frontier_layout(results, bands, name)
            drawn[f"unit-and-band{f'-{bed}' if bed else ''}"] = figure(title, _frontier_note(results), traces, layout)
    for bed in beds:
        where = f", {bed}" if len(beds) > 1 else ""
        drawn[f"accuracy{f'-{bed}' if where else ''}"] = _accuracy_beside_the_start(results, bed, where)
    return drawn


def _accuracy_beside_the_start(results: Results, bed: str, where: str) -> Figure | None:
    """Accuracy at the end over the swept option, with a line where training began: a run may survive and learn nothing."""
    axis = results["endpoint"]["axis"]
    runs = [run for run in results["runs"] if run["bed"] == bed]
    accuracy, _ = _scores_over(results, runs, axis, where)
    starts = [run["start"] for run in runs]
    if accuracy is None or None in starts:
        return accuracy
    start = math.fsum(starts) / len(starts)
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": start, "y1": start, "line": {"dash": "dot"}}
    note = f"means of {len(results['seeds'])} seeds, bars: 95 % intervals; dotted line: accuracy at the start"
    layout = accuracy.layout | {"shapes": [line]}
    layout["xaxis"] = layout["xaxis"] | {"title": {"text": f"{AXES.get(axis, axis)} ({note})"}}
    caption = f"Not registered as an endpoint. {accuracy.caption} Collapsed runs count with what they ended at."
    return replace(accuracy, layout=layout, caption=caption)


def _label(arm: str) -> str:
    """The name of an arm, with the published algorithm that it is."""
    return f"{arm} ({ROLES[arm]})" if arm in ROLES else arm


def _limits(options: Mapping[str, Any]) -> str:
    """The clip band of an arm in brackets, as in " (0.2 / 0.27)"."""
    ends = [options.get(f"algorithm.objective.trust.clip.{end}") for end in ("low", "high")]
    return "" if None in ends else f" ({' / '.join(_short(end) for end in ends if end is not None)})"


def _frontier_layout(results: Results, names: Sequence[str], up: str) -> dict[str, Any]:
    values = sorted(results["sweep"][results["endpoint"]["axis"]])
    below = values[0] / (
        values[1] / values[0] if len(values) > 1 else 2
    )  # where the analysis puts a seed that survives none
    labels = {
        "tickvals": [below, *values],
        "ticktext": [f"< {_short(values[0])}", *(_short(value) for value in values)],
    }
    ends = [math.log10(below / 1.4), math.log10(values[-1] * 1.5)]
    # The figure is quoted without its caption.
    across = (
        f"small dots: {len(results['seeds'])} seeds; bars: 95 % interval of each mean; triangle: some seeds beyond the sweep"
    )
    return {
        "xaxis": _categories(names, across),
        "yaxis": {"type": "log", **labels, "range": ends, "title": {"text": up}},
        "hovermode": "closest",
    }


def _frontier_note(results: Results) -> str:
    return (
        f"Geometric mean over {len(results['seeds'])} seeds with 95 % intervals, which are never narrower than one step of"
        " the sweep allows; small dots are seeds. A triangle points to where the frontier of at least one seed lies beyond"
        " the sweep: such a seed counts with the last value that it survived, or with half of the least."
    )


def _frontier_traces(
    results: Results, bed: str, name: str, places: Mapping[int, str], number: int, count: int, *, lines: bool = False
) -> list[Trace]:
    """The seeds as small dots, and their means with intervals."""
    middle, above, below, at, symbols = [], [], [], [], []
    room = 0.04 * len(places)  # equally wide in every figure: fewer places are further apart
    dots: list[tuple[float, float]] = []
    for place, arm in places.items():
        seeds = _frontiers(results, bed, arm)
        if not seeds:
            continue
        logs = [seed["value"] for seed in seeds]
        mean = math.fsum(logs) / len(logs)
        floor = math.sqrt(math.fsum(seed["variance"] for seed in seeds) / len(seeds))
        low, high = mean_interval(logs, floor=floor) or (mean, mean)
        x = _beside(place, number, count, gap=2 * room)
        at.append(x + room / 2)
        middle.append(2.0**mean)
        above.append(2.0**high - 2.0**mean)
        below.append(2.0**mean - 2.0**low)
        censored = {seed["censored"] for seed in seeds}
        symbols.append("triangle-down" if "low" in censored else "triangle-up" if "high" in censored else "circle")
        for value, seeds_here in Counter(logs).items():  # a row of dots for each value, left of the mean
            dots += [
                (x - 0.3 * room + 0.11 * room * (order - (seeds_here - 1) / 2), 2.0**value) for order in range(seeds_here)
            ]
    summary = _trace(name, at, middle, above, below, number, lines)
    summary["marker"]["symbol"] = symbols
    colour = summary["marker"]["color"]
    seeds_trace = {
        "type": "scatter",
        "mode": "markers",
        "name": f"{name}, seeds",
        "showlegend": False,
        "x": [x for x, _ in dots],
        "y": [y for _, y in dots],
        "marker": {"color": colour, "size": 5, "opacity": 0.5},
    }
    return [seeds_trace, summary]


def _frontiers(results: Results, bed: str, arm: str) -> list[dict[str, Any]]:
    """The frontier of each seed, as the analysis has it; empty if the arm did not run on the bed."""
    axis = results["endpoint"]["axis"]
    frontiers = []
    for seed in results["seeds"]:
        runs = [run for run in results["runs"] if (run["bed"], run["arm"], run["seed"]) == (bed, arm, seed)]
        if not runs:
            return []
        frontiers.append(frontier({run["point"][axis]: run["status"] == "done" for run in runs}))
    return frontiers


# Accuracies


def _scores(results: Results) -> dict[str, Figure | None]:
    """Accuracy at the end and survival: over a swept number for each bed, else by bed or by arm."""
    numeric = [axis for axis, values in results["sweep"].items() if all(isinstance(value, int | float) for value in values)]
    if not numeric:
        return _scores_by_bed(results)
    drawn: dict[str, Figure | None] = {}
    for bed in results["beds"]:
        several = len(results["beds"]) > 1
        runs = [run for run in results["runs"] if run["bed"] == bed]
        accuracy, survival = _scores_over(results, runs, numeric[0], f", {bed}" if several else "")
        drawn[f"accuracy{f'-{bed}' if several else ''}"] = accuracy
        drawn[f"survival{f'-{bed}' if several else ''}"] = survival
    return drawn


def _scores_over(
    results: Results, runs: Sequence[Mapping[str, Any]], axis: str, where: str
) -> tuple[Figure | None, Figure | None]:
    """Accuracy and survival over a swept option, or over the experts that flipped where noise made them flip."""
    flipped = axis == "training.router_noise" and all(run.get("flip_mean") is not None for run in runs)
    values = results["sweep"][axis]
    logarithmic = not flipped and min(values) > 0 and max(values) >= 4 * min(values)
    rows: dict[str, dict[float, list[Mapping[str, Any]]]] = {}
    for arm in results["arms"]:
        at = {value: [run for run in runs if run["arm"] == arm and run["point"][axis] == value] for value in values}
        if all(at.values()):
            rows[arm] = at
    # The dose is nearly the same for all arms: at its mean over arms they stand beside each other in their order.
    doses = {
        value: [run["flip_mean"] for at in rows.values() for run in at[value]] if flipped else [value] for value in values
    }
    middle = [math.fsum(each) / len(each) if each else 0.0 for each in doses.values()]
    places = _aside(dict.fromkeys(rows, middle), logarithmic)
    curves = [
        _points(_label(arm), places[arm], [[run["score"] or 0.0 for run in each] for each in at.values()], number)
        for number, (arm, at) in enumerate(rows.items())
    ]
    alive = [
        _shares(_label(arm), places[arm], [[run["status"] == "done" for run in each] for each in at.values()], number)
        for number, (arm, at) in enumerate(rows.items())
    ]
    shown = "experts that flipped" if flipped else AXES.get(axis, axis)
    xaxis: dict[str, Any] = {"title": {"text": _with_note(shown, results)}}
    if flipped:
        xaxis["tickformat"] = ".0%"
    elif logarithmic:
        xaxis |= {"type": "log", "tickvals": list(values), "ticktext": [_short(value) for value in values]}
    by = "dose" if flipped else shown
    note = f"{shown} (shares of {len(results['seeds'])} runs, bars: Wilson 95 % intervals)"
    of_runs = xaxis | {"title": {"text": note}}
    survived = {"tickformat": ".0%", "range": [-0.02, 1.05], "title": {"text": "runs that survived"}}
    return (
        figure(f"Accuracy at the end by {by}{where}", _note(results), curves, {"xaxis": xaxis, "yaxis": _ACCURACY}),
        figure(f"Survival by {by}{where}", "Wilson 95 % intervals.", alive, {"xaxis": of_runs, "yaxis": survived}),
    )


def _scores_by_bed(results: Results) -> dict[str, Figure | None]:
    """Accuracy at the end: arms beside each other on every bed; on a single bed, arm by arm. Where a study compares two arms
    by it, also the seeds and where training began."""
    beds, arms = list(results["beds"]), list(results["arms"])
    two = len(beds) == 1 and len(arms) == 2 and results["endpoint"]["kind"] == "score"
    scores = {
        (bed, arm): [run["score"] or 0.0 for run in results["runs"] if (run["bed"], run["arm"]) == (bed, arm)]
        for bed in beds
        for arm in arms
    }
    if len(beds) == 1:
        pairs = _pairs(results) if two else []
        traces = [*pairs, _points("", list(range(len(arms))), [scores[beds[0], arm] for arm in arms], 0, lines=False)]
        xaxis = _categories(arms, _with_note("arm", results))
    else:
        traces = [
            _points(
                arm,
                [_beside(place, number, len(arms)) for place, bed in enumerate(beds) if scores[bed, arm]],
                [scores[bed, arm] for bed in beds if scores[bed, arm]],
                number,
                lines=False,
            )
            for number, arm in enumerate(arms)
        ]
        xaxis = _categories(beds, _with_note("bed", results))
    layout: dict[str, Any] = {"xaxis": xaxis, "yaxis": _ACCURACY, "hovermode": "closest"}
    starts = [run.get("start") for run in results["runs"]]
    if two and None not in starts:
        start = math.fsum(starts) / len(starts)
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": start, "y1": start, "line": {"dash": "dot"}}
        ]
        note = f"large dots: means of {len(results['seeds'])} seeds, bars: 95 % interval of each"
        xaxis["title"] = {"text": f"arm ({note}; grey: seeds; dotted: mean at the start)"}
    registered = "" if results["endpoint"]["kind"] == "score" else "Not registered as an endpoint. "
    accuracy = figure("Accuracy at the end", f"{registered}{_note(results)}", traces, layout)
    return {"accuracy": accuracy, "loss": _losses(results)}


def _pairs(results: Results) -> list[Trace]:
    """The runs of each seed as small dots with a line between the arms: these are what a comparison of two arms compares."""
    scores = {(run["arm"], run["seed"]): run["score"] or 0.0 for run in results["runs"]}
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"seed {seed}",
            "showlegend": False,
            "x": [0.06, 0.94],  # inside of the means, whose bars would hide them
            "y": [scores[arm, seed] for arm in results["arms"]],
            "line": {"color": "#9aa5b5", "width": 1},
            "marker": {"color": "#9aa5b5", "size": 5},
        }
        for seed in results["seeds"]
    ]


def _losses(results: Results) -> Figure | None:
    """What each arm loses from the bed that all comparisons share to every other bed; None if there is no such bed."""
    common = _common_bed(results)
    if common is None:
        return None
    beds, arms = [bed for bed in results["beds"] if bed != common], list(results["arms"])
    scores = {(run["bed"], run["arm"], run["seed"]): run["score"] or 0.0 for run in results["runs"]}
    traces: list[Trace] = []
    for number, arm in enumerate(arms):
        rows = [[100 * (scores[common, arm, seed] - scores[bed, arm, seed]) for seed in results["seeds"]] for bed in beds]
        at = [_beside(place, number, len(arms), gap=0.4) for place in range(len(beds))]
        summary = _points(arm, [x + 0.06 for x in at], rows, number, lines=False, shares=False)
        dots = {
            "type": "scatter",
            "mode": "markers",
            "name": f"{arm}, seeds",
            "showlegend": False,
            "x": [x - 0.06 for x, row in zip(at, rows, strict=True) for _ in row],
            "y": [value for row in rows for value in row],
            "marker": {"color": summary["marker"]["color"], "size": 5, "opacity": 0.5},
        }
        traces += [dots, summary]
    zero = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0.0, "y1": 0.0, "line": {"dash": "dot"}}
    layout = {
        "xaxis": _categories(beds, f"bed (small dots: {len(results['seeds'])} seeds; bars: 95 % interval of each mean)"),
        "yaxis": {"title": {"text": f"points of accuracy lost beside {common}"}},
        "shapes": [zero],
        "hovermode": "closest",
    }
    note = f"Accuracy at the end on the bed {common} minus that on each other bed, seed by seed. {_note(results)}"
    note += " The registered comparisons are differences between these losses."
    return figure(f"Accuracy lost beside {common}", note, traces, layout)


def _common_bed(results: Results) -> str | None:
    """The bed that every comparison sets beside one other; None if there is none or several."""
    pairs = [{term["bed"] for term in each["terms"]} for each in results.get("comparisons") or []]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        return None
    common = set.intersection(*pairs)
    return common.pop() if len(common) == 1 else None


def _curves(results: Results) -> dict[str, Figure | None]:
    """Accuracy over sampled tokens for each bed: means over seeds at every evaluation, at their mean number of tokens."""
    drawn: dict[str, Figure | None] = {}
    for bed in results["beds"]:
        rows: dict[str, list[list[Mapping[str, Any]]]] = {}
        for arm in results["arms"]:
            runs = [run for run in results["runs"] if (run["bed"], run["arm"]) == (bed, arm) and run["evaluations"]]
            if runs:
                count = min(len(run["evaluations"]) for run in runs)
                rows[arm] = [[run["evaluations"][place] for run in runs] for place in range(count)]
        tokens = {
            arm: [math.fsum(each["tokens"] for each in row) / len(row) / 1e6 for row in at] for arm, at in rows.items()
        }
        places = _aside(tokens, logarithmic=False)
        traces = [
            _points(arm, places[arm], [[each["sampled"] for each in row] for row in at], number)
            for number, (arm, at) in enumerate(rows.items())
        ]
        where = f", {bed}" if len(results["beds"]) > 1 else ""
        layout = {
            "xaxis": {"title": {"text": _with_note("million sampled tokens", results)}},
            "yaxis": {"tickformat": ".0%", "title": {"text": "held-out accuracy"}},
        }
        name = f"curves{f'-{bed}' if where else ''}"
        drawn[name] = figure(f"Accuracy over sampled tokens{where}", _note(results), traces, layout)
    return drawn


def _with_note(shown: str, results: Results) -> str:
    """The title of an axis that says what the bars are: figures are quoted without their captions."""
    precisions = sorted(results.get("precision") or {})  # absent from older results
    mixed = f"; runs in {' and '.join(precisions)}" if len(precisions) > 1 else ""
    return f"{shown} (means of {len(results['seeds'])} seeds, bars: 95 % interval of each{mixed})"


def _note(results: Results) -> str:
    return (
        f"Mean over {len(results['seeds'])} seeds, with the 95 % interval of each mean. The comparisons are made seed by"
        " seed: bars that overlap do not say that arms are alike."
    )


# Measurements


def _measurement_figures(results: Results) -> dict[str, Figure | None]:
    """The measured value by the first swept axis, a figure for each value of the second."""
    first, *others = results["sweep"]
    values = results["sweep"][first]
    drawn: dict[str, Figure | None] = {}
    for other in results["sweep"][others[0]] if others else [None]:
        places = _aside({arm: list(values) for arm in results["arms"]}, logarithmic=True)
        traces = []
        for number, arm in enumerate(results["arms"]):
            runs = [run for run in results["runs"] if run["arm"] == arm and (not others or run["point"][others[0]] == other)]
            rows = [[run["value"] for run in runs if run["point"][first] == value] for value in values]
            traces.append(_points(arm, places[arm], rows, number, shares=False))
        ticks = {"tickvals": values, "ticktext": [str(value) for value in values]}
        layout = {
            "xaxis": {"type": "log", "title": {"text": _with_note(AXES.get(first, first), results)}, **ticks},
            "yaxis": {"title": {"text": LABELS.get(results["measure"], results["measure"])}},
        }
        name = "by-length" if other is None else f"by-length-{others[0]}{other:g}"
        title = results["title"] if other is None else f"{results['title']}, {others[0]} {other:g}"
        note = f"{results['endpoint']['means'].capitalize()}. {_note(results)}"
        drawn[name] = figure(title, note, traces, layout)
    return drawn


# Traces


def _categories(names: Sequence[str], title: str) -> dict[str, Any]:
    """An axis of names at 0, 1, 2 ..., so that traces can stand beside each other."""
    places = list(range(len(names)))
    return {"title": {"text": title}, "tickvals": places, "ticktext": list(names), "range": [-0.5, len(names) - 0.5]}


def _beside(place: float, number: int, count: int, gap: float = 0.24) -> float:
    """The place of one of `count` traces around the place of a category."""
    return place + gap * (number - (count - 1) / 2)


def _aside(places: Mapping[str, Sequence[float]], logarithmic: bool) -> dict[str, list[float]]:
    """Places moved apart by about a hundredth of the axis, since arms that agree would hide each other's intervals."""
    every = [math.log(place) if logarithmic else place for row in places.values() for place in row]
    step = 0.011 * ((max(every) - min(every)) if every else 0.0)
    shifts = {arm: step * (number - (len(places) - 1) / 2) for number, arm in enumerate(places)}
    return {
        arm: [place * math.exp(shifts[arm]) if logarithmic else place + shifts[arm] for place in row]
        for arm, row in places.items()
    }


def _short(value: float) -> str:
    """1.2e-4 for 0.00012; 0.05 as it is."""
    if value == 0 or abs(value) >= 1e-2:
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _points(
    name: str,
    places: Sequence[float],
    rows: Sequence[Sequence[float]],
    number: int,
    *,
    lines: bool = True,
    shares: bool = True,
) -> Trace:
    """A trace of means with their t intervals, which end at 0 and 1 for shares."""
    middle, above, below = [], [], []
    for values in rows:
        mean = math.fsum(values) / len(values)
        low, high = (share_interval if shares else mean_interval)(values) or (mean, mean)
        middle.append(mean)
        above.append(high - mean)
        below.append(mean - low)
    return _trace(name, places, middle, above, below, number, lines)


def _shares(name: str, places: Sequence[float], rows: Sequence[Sequence[bool]], number: int) -> Trace:
    """A trace of shares with their Wilson intervals."""
    middle = [sum(row) / len(row) for row in rows]
    ends = [wilson_interval(sum(row), len(row)) for row in rows]
    above = [high - share for (_, high), share in zip(ends, middle, strict=True)]
    below = [share - low for (low, _), share in zip(ends, middle, strict=True)]
    return _trace(name, places, middle, above, below, number, True)


def _trace(
    name: str,
    places: Sequence[float],
    middle: Sequence[float],
    above: Sequence[float],
    below: Sequence[float],
    number: int,
    lines: bool,
) -> Trace:
    colour = ARMS[number % len(ARMS)]
    return {
        "type": "scatter",
        "mode": "lines+markers" if lines else "markers",
        "name": name,
        "x": list(places),
        "y": list(middle),
        "line": {"color": colour, "width": 2, "dash": DASHES[number % len(DASHES)]},
        "marker": {"color": colour, "size": 9},
        "error_y": {"type": "data", "symmetric": False, "array": list(above), "arrayminus": list(below)},
    }
