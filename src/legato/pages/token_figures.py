"""Figures of what was measured at the tokens of stored rollouts: ratios, their spread against length, one response."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from legato.pages.curves import quantile, short
from legato.pages.legible import piece
from legato.pages.summary import Record, number
from legato.pages.traces import AMBER, BLUE, GREEN, GREY, VIOLET, Figure, Trace, axis, band_edges, figure, line, shares
from legato.records.directory import RunDirectory
from legato.records.lines import RunDirectoryError

_STEPS_READ = 10
"""The last steps with stored rollouts: a long run has hundreds."""
_FEWEST = 8
"""Responses of like length whose variance means something."""
_STRIP = 60
"""Tokens of the one response that is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A response whose ratios an update saw after the policy had moved."""

    step: int
    record: Record
    log_ratios: list[float]

    @property
    def update(self) -> tuple[int, float | None]:
        """Which update saw it: its step, and its number there."""
        return self.step, number(self.record["details"], "update")

    @property
    def log_s(self) -> float:
        """The log of the sequence ratio."""
        return math.fsum(self.log_ratios) / len(self.log_ratios)


def measured(directory: RunDirectory) -> list[Measured]:
    """Of the last steps; what cannot be read is left out."""
    found = []
    try:
        steps = directory.rollout_steps()[-_STEPS_READ:]
    except OSError:
        return []
    for step in steps:
        try:
            records = directory.read_rollouts(step)
        except (RunDirectoryError, ValueError):
            continue
        found += [each for record in records if (each := _measured(record, step)) is not None]
    return found


def _measured(record: Record, step: int) -> Measured | None:
    details = record.get("details")
    values = details.get("log_ratios") if isinstance(details, Mapping) else None
    known = [value for each in values if (value := number({"": each}, "")) is not None] if isinstance(values, list) else []
    # The first update of a step measures the policy against itself; a response measured in part has no log s.
    moved = isinstance(details, Mapping) and bool(number(details, "update"))
    whole = isinstance(values, list) and len(values) == number(record, "tokens")
    return Measured(step=step, record=record, log_ratios=known) if moved and whole and any(known) else None


def token_figures(directory: RunDirectory, steps: Sequence[Record]) -> list[Figure]:
    """What the stored rollouts allow."""
    found = measured(directory)
    if not found:
        return []
    band = next((record for record in reversed(steps) if number(record, "clip/band_high") is not None), {})
    made = (_histograms(found, band), _variance(found), strip(_most_moved(found), band))
    return [each for each in made if each is not None]


# Histograms


def _histograms(found: Sequence[Measured], band: Record) -> Figure | None:
    tokens = [abs(value) for each in found for value in each.log_ratios if value]
    sequences = [abs(each.log_s) for each in found if each.log_s]
    if not tokens or not sequences:
        return None
    both = [math.log10(value) for value in [*tokens, *sequences]]
    low, high = math.floor(4 * min(both)) / 4, math.ceil(4 * max(both)) / 4
    low, high = max(low, high - 8), max(high, low + 0.25)
    edges = [low + index / 8 for index in range(round((high - low) * 8) + 1)]
    data = [
        _outline(tokens, edges, "tokens: |log w|", AMBER),
        _outline(sequences, edges, "responses: |log s|", BLUE),
    ]
    layout = shares("share", whole=False) | {"hovermode": "closest", "shapes": band_edges(band, "x", sizes=True)}
    layout["xaxis"] = {"title": {"text": "distance of the log-ratio from 0"}, "type": "log", "exponentformat": "power"}
    caption = (
        f"How far tokens and whole responses moved within a step; {len(sequences):,} responses of the last stored steps."
        " Dashed: the clip band. A mean over a response is smaller than its tokens by about the root of its length."
    )
    return figure("Ratios of tokens and of responses", caption, data, layout)


def _outline(values: Sequence[float], edges: Sequence[float], name: str, colour: str) -> Trace:
    """A histogram as a filled line: two of them can be seen through each other."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = math.floor((math.log10(value) - edges[0]) * 8)
        counts[min(max(0, place), len(counts) - 1)] += 1
    middles = [10 ** ((left + right) / 2) for left, right in pairwise(edges)]
    trace = line([short(x) for x in middles], [short(count / len(values)) for count in counts], name, colour)
    return trace | {
        "mode": "lines",
        "line": {"color": colour, "width": 2, "shape": "hvh"},
        "fill": "tozeroy",
        "opacity": 0.9,
    }


# Variance against length


def _variance(found: Sequence[Measured]) -> Figure | None:
    """Var(log s) by length, beside what independent tokens would give."""
    groups: dict[int, list[Measured]] = {}
    for each in found:
        groups.setdefault(round(4 * math.log2(len(each.log_ratios))), []).append(each)
    kept = [members for _, members in sorted(groups.items()) if len(members) >= _FEWEST]
    updates: dict[tuple[int, float | None], list[float]] = {}
    for each in found:
        updates.setdefault(each.update, []).append(each.log_s)
    points = [(_length(members), *_spread(members, updates)) for members in kept]
    points = [(length, variance, freedom) for length, variance, freedom in points if variance > 0]
    if len(points) < 2:
        return None
    lengths, variances = [length for length, _, _ in points], [variance for _, variance, _ in points]
    # Wilson-Hilferty: chi-squared, 95 %.
    ends = [_interval(variance, freedom) for _, variance, freedom in points]
    inside = [(value - each.log_s) ** 2 for each in found for value in each.log_ratios]
    freedom = sum(len(each.log_ratios) - 1 for each in found)
    sigma2 = math.fsum(inside) / freedom if freedom else 0.0
    slope = _slope([math.log(x) for x in lengths], [math.log(y) for y in variances])
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"measured, slope {slope:.2f}",
            "x": [short(x) for x in lengths],
            "y": [short(y) for y in variances],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [short(high - y) for y, (_, high) in zip(variances, ends, strict=True)],
                "arrayminus": [short(y - low) for y, (low, _) in zip(variances, ends, strict=True)],
                "thickness": 1.2,
                "width": 3,
            },
            "line": {"color": BLUE, "width": 2},
            "marker": {"color": BLUE, "size": 8},
        }
    ]
    if sigma2 > 0:
        even = [short(sigma2 / x) for x in lengths]
        data.append(line([short(x) for x in lengths], even, "independent tokens, slope -1", GREY, dash="dash"))
    layout: dict[str, Any] = {"hovermode": "closest"}
    layout["xaxis"] = {"title": {"text": "tokens of a response"}, "type": "log"}
    layout["yaxis"] = {"title": {"text": "Var(log s)"}, "type": "log", "exponentformat": "power"}
    caption = (
        "Variance of log s over responses of like length, with 95 % intervals; what all responses of an update moved by is"
        " taken off. Above the dashed line tokens move together;"
        " a slope flatter than -1 means drift between responses or long memory."
    )
    return figure("Variance against length", caption, data, layout)


def _length(members: Sequence[Measured]) -> float:
    return math.fsum(len(each.log_ratios) for each in members) / len(members)


def _spread(members: Sequence[Measured], updates: Mapping[Any, Sequence[float]]) -> tuple[float, float]:
    """Variance around the mean of each one's update, and its degrees of freedom: a mean of n takes 1 / n from each."""
    around = [(each.log_s, updates[each.update]) for each in members]
    freedom = len(members) - math.fsum(1 / len(mine) for _, mine in around)
    squares = math.fsum((value - math.fsum(mine) / len(mine)) ** 2 for value, mine in around)
    return (squares / freedom, freedom) if freedom >= 1 else (0.0, 0.0)


def _interval(variance: float, freedom: float) -> tuple[float, float]:
    part = 2 / (9 * freedom)
    quantiles = [max(1e-9, 1 - part + sign * 1.96 * math.sqrt(part)) ** 3 for sign in (1, -1)]
    return variance / quantiles[0], variance / quantiles[1]


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    middle, level = math.fsum(x) / len(x), math.fsum(y) / len(y)
    over = math.fsum((a - middle) ** 2 for a in x)
    return math.fsum((a - middle) * (b - level) for a, b in zip(x, y, strict=True)) / over if over else math.nan


# One response


def _most_moved(found: Sequence[Measured]) -> Measured:
    """Of the newest step, a typical response and no outlier: the one at the upper quartile of how far its tokens moved."""
    newest = [each for each in found if each.step == found[-1].step]
    sizes = [max(map(abs, each.log_ratios)) for each in newest]
    wanted = quantile(sorted(sizes), 0.75)
    return min(zip(newest, sizes, strict=True), key=lambda pair: abs(pair[1] - wanted))[0]


def strip(chosen: Measured, band: Record) -> Figure | None:
    """A response token by token: its log-ratios, which of them had no gradient, and log s."""
    details = chosen.record["details"]
    pieces = [html.escape(piece(str(each))) for each in details["pieces"]][:_STRIP]
    values = [number({"": value}, "") for value in details["log_ratios"]][:_STRIP]
    coefficients = details.get("coefficients") or [None] * len(pieces)
    places = list(range(1, len(pieces) + 1))
    bars = [
        (x, y, coefficient == 0) for x, y, coefficient in zip(places, values, coefficients, strict=False) if y is not None
    ]
    data: list[Trace] = [
        {
            "type": "bar",
            "name": name,
            "x": [x for x, _, _ in mine],
            "y": [short(y) for _, y, _ in mine],
            "text": [pieces[x - 1] for x, _, _ in mine],
            "textposition": "none",
            "hovertemplate": "%{text}: %{y:.3~e}<extra></extra>",
            "marker": {"color": colour, "line": {"width": 0}},
        }
        for name, colour, silent in (("with a gradient", GREEN, False), ("no gradient", AMBER, True))
        if (mine := [bar for bar in bars if bar[2] is silent])
    ]
    data.append(line([0.5, len(pieces) + 0.5], [short(chosen.log_s)] * 2, "log s", VIOLET))
    layout = axis("log-ratio") | {"hovermode": "closest", "barmode": "overlay", "shapes": band_edges(band, "y")}
    layout["yaxis"] |= {"tickformat": ".1e", "nticks": 7}
    layout["xaxis"] = {
        "title": {"text": "token"},
        "tickmode": "array",
        "tickvals": places,
        "ticktext": pieces,
        "tickangle": -60,
    }
    advantage = number(chosen.record, "advantage")
    said = "" if advantage is None else f" Its advantage is {advantage:.3g}."
    more = "" if len(details["pieces"]) <= _STRIP else f" The first {_STRIP} of {len(details['pieces'])} tokens."
    caption = f"A response of step {chosen.step}, token by token.{said}{more} Dashed: the clip band."
    return figure("Token strip", caption, data, layout, wide=True)
