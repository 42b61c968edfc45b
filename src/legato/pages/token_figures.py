"""Figures of the token ratios in stored rollouts: distribution, variance against length, one response."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from legato.pages.curves import quantile, round_six
from legato.pages.legible import piece
from legato.pages.summary import Record, number
from legato.pages.traces import AMBER, BLUE, GREY, Figure, Trace, axis, band_edges, figure, line, shares
from legato.records.directory import RunDirectory
from legato.records.lines import RunDirectoryError

_STEPS_READ = 10
"""Only the last steps with stored rollouts are read: a long run has hundreds."""
_FEWEST = 8
"""Fewest responses of similar length for a variance."""
_STRIP = 60
"""Tokens drawn of the one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredResponse:
    """A response whose ratios were measured after the policy had moved."""

    step: int
    record: Record
    log_ratios: list[float]

    @property
    def update(self) -> tuple[int, float | None]:
        """The step and the number of the update that measured it."""
        return self.step, number(self.record["details"], "update")

    @property
    def log_s(self) -> float:
        """The log of the sequence ratio."""
        return math.fsum(self.log_ratios) / len(self.log_ratios)


def measured_responses(directory: RunDirectory) -> list[MeasuredResponse]:
    """Read the measured responses of the last steps. Unreadable files are left out."""
    responses = []
    try:
        steps = directory.rollout_steps()[-_STEPS_READ:]
    except OSError:
        return []
    for step in steps:
        try:
            records = directory.read_rollouts(step)
        except (RunDirectoryError, ValueError):
            continue
        responses += [each for record in records if (each := _measured_response(record, step)) is not None]
    return responses


def _measured_response(record: Record, step: int) -> MeasuredResponse | None:
    details = record.get("details")
    values = details.get("log_ratios") if isinstance(details, Mapping) else None
    known = [value for each in values if (value := number({"": each}, "")) is not None] if isinstance(values, list) else []
    # The first update of a step measures the policy against itself; a response measured in part has no log s.
    moved = isinstance(details, Mapping) and bool(number(details, "update"))
    whole = isinstance(values, list) and len(values) == number(record, "tokens")
    return MeasuredResponse(step=step, record=record, log_ratios=known) if moved and whole and any(known) else None


def token_figures(directory: RunDirectory, steps: Sequence[Record]) -> list[Figure]:
    """Return the figures that the stored rollouts allow."""
    responses = measured_responses(directory)
    if not responses:
        return []
    band = next((record for record in reversed(steps) if number(record, "clip/band_high") is not None), {})
    drawn = (_histograms(responses, band), _variance(responses), strip(_typical_response(responses), band))
    return [each for each in drawn if each is not None]


# Histograms


def _histograms(responses: Sequence[MeasuredResponse], band: Record) -> Figure | None:
    tokens = [abs(value) for each in responses for value in each.log_ratios if value]
    sequences = [abs(each.log_s) for each in responses if each.log_s]
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
    """Return a histogram as a filled line, so that two can overlap visibly."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = math.floor((math.log10(value) - edges[0]) * 8)
        counts[min(max(0, place), len(counts) - 1)] += 1
    middles = [10 ** ((left + right) / 2) for left, right in pairwise(edges)]
    trace = line([round_six(x) for x in middles], [round_six(count / len(values)) for count in counts], name, colour)
    return trace | {
        "mode": "lines",
        "line": {"color": colour, "width": 2, "shape": "hvh"},
        "fill": "tozeroy",
        "opacity": 0.9,
    }


# Variance against length


def _variance(responses: Sequence[MeasuredResponse]) -> Figure | None:
    """Draw Var(log s) by length beside the variance of independent tokens."""
    groups: dict[int, list[MeasuredResponse]] = {}
    for each in responses:
        groups.setdefault(round(4 * math.log2(len(each.log_ratios))), []).append(each)
    bins = [members for _, members in sorted(groups.items()) if len(members) >= _FEWEST]
    updates: dict[tuple[int, float | None], list[float]] = {}
    for each in responses:
        updates.setdefault(each.update, []).append(each.log_s)
    points = [(_length(members), *_spread(members, updates)) for members in bins]
    points = [(length, variance, freedom) for length, variance, freedom in points if variance > 0]
    if len(points) < 2:
        return None
    lengths, variances = [length for length, _, _ in points], [variance for _, variance, _ in points]
    # Wilson-Hilferty: chi-squared, 95 %.
    ends = [_interval(variance, freedom) for _, variance, freedom in points]
    inside = [(value - each.log_s) ** 2 for each in responses for value in each.log_ratios]
    freedom = sum(len(each.log_ratios) - 1 for each in responses)
    sigma2 = math.fsum(inside) / freedom if freedom else 0.0
    slope = _slope([math.log(x) for x in lengths], [math.log(y) for y in variances])
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"measured, slope {slope:.2f}",
            "x": [round_six(x) for x in lengths],
            "y": [round_six(y) for y in variances],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [round_six(high - y) for y, (_, high) in zip(variances, ends, strict=True)],
                "arrayminus": [round_six(y - low) for y, (low, _) in zip(variances, ends, strict=True)],
                "thickness": 1.2,
                "width": 3,
            },
            "line": {"color": BLUE, "width": 2},
            "marker": {"color": BLUE, "size": 8},
        }
    ]
    if sigma2 > 0:
        even = [round_six(sigma2 / x) for x in lengths]
        data.append(line([round_six(x) for x in lengths], even, "independent tokens, slope -1", GREY, dash="dash"))
    layout: dict[str, Any] = {"hovermode": "closest"}
    layout["xaxis"] = {"title": {"text": "tokens of a response"}, "type": "log"}
    layout["yaxis"] = {"title": {"text": "Var(log s)"}, "type": "log", "exponentformat": "power"}
    caption = (
        "Variance of log s over responses of like length, with 95 % intervals; what all responses of an update moved by is"
        " taken off. Above the dashed line tokens move together;"
        " a slope flatter than -1 means drift between responses or long memory."
    )
    return figure("Variance against length", caption, data, layout)


def _length(members: Sequence[MeasuredResponse]) -> float:
    return math.fsum(len(each.log_ratios) for each in members) / len(members)


def _spread(members: Sequence[MeasuredResponse], updates: Mapping[Any, Sequence[float]]) -> tuple[float, float]:
    """Return the variance around the mean of each response's update, and its degrees of freedom."""
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


def _typical_response(responses: Sequence[MeasuredResponse]) -> MeasuredResponse:
    """Return the response of the newest step at the upper quartile of the largest token movement: typical, no outlier."""
    newest = [each for each in responses if each.step == responses[-1].step]
    sizes = [max(map(abs, each.log_ratios)) for each in newest]
    target = quantile(sorted(sizes), 0.75)
    return min(zip(newest, sizes, strict=True), key=lambda pair: abs(pair[1] - target))[0]


def strip(chosen: MeasuredResponse, band: Record) -> Figure | None:
    """Draw one response token by token: log-ratios, tokens without a gradient, and log s."""
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
            "x": [x for x, _, _ in selected],
            "y": [round_six(y) for _, y, _ in selected],
            "text": [pieces[x - 1] for x, _, _ in selected],
            "textposition": "none",
            "hovertemplate": "%{text}: %{y:.3~e}<extra></extra>",
            "marker": {"color": colour, "line": {"width": 0}},
        }
        for name, colour, silent in (("with a gradient", BLUE, False), ("no gradient", AMBER, True))
        if (selected := [bar for bar in bars if bar[2] is silent])
    ]
    data.append(line([0.5, len(pieces) + 0.5], [round_six(chosen.log_s)] * 2, "log s", GREY))
    layout = axis("log-ratio") | {"hovermode": "closest", "barmode": "overlay", "shapes": band_edges(band, "y")}
    layout["yaxis"] |= {"tickformat": ".3~g", "nticks": 7}
    layout["xaxis"] = {
        "title": {"text": "token"},
        "tickmode": "array",
        "tickvals": places,
        "ticktext": pieces,
        "tickangle": -60,
    }
    advantage = number(chosen.record, "advantage")
    advantage_words = "" if advantage is None else f" Its advantage is {advantage:.3g}."
    more = "" if len(details["pieces"]) <= _STRIP else f" The first {_STRIP} of {len(details['pieces'])} tokens."
    caption = (
        f"A response of step {chosen.step} and the log-ratios of its tokens.{advantage_words}{more} Dashed: the clip band."
    )
    return figure("One response, token by token", caption, data, layout, wide=True)
