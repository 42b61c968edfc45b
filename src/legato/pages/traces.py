"""Building blocks of figures: plain plotly dictionaries, SVG traces only, colours for light and dark pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from legato.pages.curves import Curve, curve
from legato.pages.summary import Record, number

BLUE, GREEN, AMBER, RED, VIOLET, GREY = "#2f7fe8", "#0e9f7e", "#d97706", "#dc2626", "#7c3aed", "#8493a8"
"""Each has a contrast of 3 with the cards of a light and of a dark page."""
UPDATES = ("#06b6d4", "#2f7fe8", "#7c3aed", "#db2777", "#f97316", "#b58900", "#0e9f7e", "#64748b")
"""One colour per update of a step."""

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure with its caption."""

    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any]
    wide: bool = False
    keys: tuple[str, ...] = ()
    """The metrics shown."""


def average_line(records: Sequence[Record], key: str, name: str, colour: str) -> list[Trace]:
    average = curve(records, key)
    return [] if average is None else [line(average.steps, average.average, name, colour)]


def line_with_band(quantity: Curve, name: str, colour: str) -> list[Trace]:
    """Return traces of a moving average with its band, and the values themselves faintly."""
    if quantity.window == 1:
        return [line(quantity.steps, quantity.values, name, colour)]
    raw = line(quantity.steps, quantity.values, "each step", colour, width=1) | {"opacity": 0.3, "showlegend": False}
    average = line(quantity.steps, quantity.average, name, colour)
    return [
        *band(quantity.steps, quantity.low, quantity.high, f"p10 to p90 of {quantity.window} steps", colour),
        raw,
        average,
    ]


def band(x: list[float], low: list[float], high: list[float], name: str, colour: str) -> list[Trace]:
    edge = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0}, "hoverinfo": "skip", "legendgroup": name}
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.18)"}
    return [{**edge, "y": low, "showlegend": False}, {**edge, **fill, "y": high, "name": name}]


def line(
    x: list[float], y: Sequence[float | None], name: str, colour: str, width: float = 2.2, dash: str = "solid"
) -> Trace:
    mode = {"mode": "lines"} if len(x) > 1 else {"mode": "markers", "marker": {"color": colour, "size": 9}}
    return {
        "type": "scatter",
        "name": name,
        "x": x,
        "y": list(y),
        "line": {"color": colour, "width": width, "dash": dash},
        **mode,
    }


def axis(title: str, least: float | None = None) -> dict[str, Any]:
    return {"yaxis": {"title": {"text": title}} | ({} if least is None else {"rangemode": "tozero"})}


def shares(title: str, *, whole: bool = True) -> dict[str, Any]:
    axis = {"title": {"text": title}, "tickformat": ".0%" if whole else ".3~p", "hoverformat": ".1%", "rangemode": "tozero"}
    return {"yaxis": axis | ({"range": [-0.02, 1.02]} if whole else {})}


def logarithmic(title: str) -> dict[str, Any]:
    """Return a logarithmic axis with labels at 1, 2 and 5 instead of at every digit."""
    return {"yaxis": {"title": {"text": title}, "type": "log", "dtick": "D2", "tickformat": "~g"}}


def figure(
    title: str,
    caption: str,
    data: list[Trace],
    layout: dict[str, Any],
    *,
    wide: bool = False,
    keys: Sequence[str] = (),
) -> Figure | None:
    """Return a figure; None without data. A logarithmic axis without a value above 0 becomes linear; the caption says so."""
    if not any(y is not None for trace in data for y in trace["y"]):
        return None
    if layout.get("yaxis", {}).get("type") == "log":
        least = min((y for trace in data for y in trace["y"] if y is not None and y > 0), default=None)
        if least is not None:
            data = [_for_logarithms(trace, least) for trace in data]
            most = max(y for trace in data for y in trace["y"] if y is not None)
            if most < 4 * least or most > 1000 * least:  # labels at 1, 2 and 5 would be too few or too many
                layout = layout | {"yaxis": layout["yaxis"] | {"dtick": None}}
        else:
            caption += " No value is above 0, so the axis is linear."
            layout = layout | axis(layout["yaxis"]["title"]["text"], least=0)
    entries = sum(trace.get("showlegend", True) for trace in data)
    whole = {"xaxis": {"title": {"text": "step"}}, "hovermode": "x unified", "showlegend": entries > 1} | layout
    return Figure(title=title, caption=caption, data=data, layout=whole, wide=wide, keys=tuple(keys))


def _for_logarithms(trace: Trace, least: float) -> Trace:
    """Return the trace with a gap where it is not above 0, and with markers if a point between two gaps has no line.

    The edges of a band have no gaps: where they are not above 0 they lie at `least`.
    """
    if trace["type"] != "scatter" or trace.get("mode") != "lines":
        return trace
    if trace["line"].get("width") == 0:
        return trace | {"y": [y if y is None else max(y, least) for y in trace["y"]]}
    y = [value if value is not None and value > 0 else None for value in trace["y"]]
    around = [None, *y, None]
    alone = any(a is None and b is not None and c is None for a, b, c in zip(around, y, around[2:], strict=False))
    if not alone:
        return trace | {"y": y}
    return trace | {"y": y, "mode": "lines+markers", "marker": {"color": trace["line"]["color"], "size": 5}}


def band_edges(record: Record, direction: str, *, sizes: bool = False) -> list[dict[str, Any]]:
    """Return the clip band of a step as dashed lines at log-ratios on axis "x" or "y"; `sizes`: without sign."""
    low, high = number(record, "clip/band_low"), number(record, "clip/band_high")
    bounds = [math.log1p(-low) if low is not None and low < 1 else None, math.log1p(high) if high is not None else None]
    other = "y" if direction == "x" else "x"
    return [
        {
            "type": "line",
            **{f"{direction}{end}": abs(bound) if sizes else bound for end in (0, 1)},
            **{f"{other}{end}": end for end in (0, 1)},
            f"{other}ref": "paper",
            "line": {"color": RED, "width": 1.5, "dash": "dash"},
        }
        for bound in bounds
        if bound is not None and (bound or not sizes)
    ]
