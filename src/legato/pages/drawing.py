"""Draws figures as SVG files, for papers and pages without scripts, and converts them to PNG if a tool is installed.

Supported of plotly's dictionaries: scatter (lines, circles and triangles, bands, error bars) and bars over linear,
logarithmic and category axes, and straight lines. Everything else is left out.
"""

import html
import math
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.pages.traces import BLUE, Figure, Trace

WIDTH, HEIGHT = 760, 430
_LEFT, _RIGHT, _BOTTOM, _LINE = 78, 20, 56, 18
_DASHES = {"dash": "7 4", "dot": "2 4", "dashdot": "7 4 2 4"}
_INK, _DIM, _GRID = "#16202e", "#5d6b7e", "#e3e7ee"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Maps values to pixels along one axis."""

    low: float
    high: float
    """In the units of the axis: decades where it is logarithmic."""
    start: float
    end: float
    kind: str
    names: tuple[str, ...] = ()

    def at(self, value: Any) -> float | None:
        """Return the pixel of a value; None if it has no place on the axis."""
        if self.kind == "category":
            number = float(self.names.index(str(value))) if str(value) in self.names else None
        elif not isinstance(value, int | float) or not math.isfinite(value):
            number = None
        elif self.kind == "log":
            number = math.log10(value) if value > 0 else None
        else:
            number = float(value)
        if number is None:
            return None
        return self.start + (self.end - self.start) * (number - self.low) / (self.high - self.low)


def draw_svg(figure: Figure) -> str:
    """Return the figure as SVG text, with title and legend."""
    in_legend = [trace for trace in figure.data if trace.get("showlegend", True) and trace.get("name")]
    legend = _legend(in_legend if figure.layout.get("showlegend", len(in_legend) > 1) else [])
    top = 44 + _LINE * legend[1]
    x = _scale("x", figure, _LEFT, WIDTH - _RIGHT)
    y = _scale("y", figure, HEIGHT - _BOTTOM, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="system-ui, sans-serif" font-size="12" fill="{_INK}">',
        f"<title>{html.escape(figure.title)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="600">{html.escape(figure.title)}</text>',
        *legend[0],
        *_axes(figure, x, y, top),
    ]
    before: Trace | None = None
    for number, trace in enumerate(figure.data):
        if trace["type"] == "bar":
            parts += _bars(figure, number, x, y)
        else:
            parts += _scatter(trace, before, x, y)
        before = trace
    for shape in figure.layout.get("shapes", ()):
        parts += _straight_line(shape, x, y, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def rasterise(svg: Path) -> Path | None:
    """Convert an SVG file to a PNG of twice the resolution beside it, with the first tool that works; None if none does."""
    png = svg.with_suffix(".png")
    size = f"{WIDTH},{HEIGHT}"
    tools: dict[str, Callable[[str, str], list[str]]] = {
        "rsvg-convert": lambda tool, _: [tool, "--zoom=2", f"--output={png}", str(svg)],
        "inkscape": lambda tool, _: [tool, f"--export-filename={png}", "--export-dpi=192", str(svg)],
        **{
            name: lambda tool, profile: [
                *(tool, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"),
                *(f"--screenshot={png.resolve()}", f"--window-size={size}", "--force-device-scale-factor=2"),
                svg.resolve().as_uri(),
            ]
            for name in ("chromium", "chromium-browser", "google-chrome")
        },
    }
    for name, command in tools.items():
        tool = shutil.which(name)
        if tool is None:
            continue
        with tempfile.TemporaryDirectory() as profile:
            try:
                done = subprocess.run(command(tool, profile), capture_output=True, timeout=60, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
        if done.returncode == 0 and png.is_file():
            return png
    return None


def _scale(name: str, figure: Figure, start: float, end: float) -> _Scale:
    axis = figure.layout.get(f"{name}axis", {})
    values = [value for trace in figure.data for value in _values(trace, name)]
    values += [shape[f"{name}{end}"] for shape in figure.layout.get("shapes", ()) for end in (0, 1) if _in_data(shape, name)]
    words = tuple(dict.fromkeys(str(value) for value in values if isinstance(value, str)))
    if axis.get("type") == "category" or words:
        names = words or tuple(dict.fromkeys(str(value) for value in values))
        return _Scale(low=-0.5, high=len(names) - 0.5, start=start, end=end, kind="category", names=names)
    positive = any(isinstance(v, int | float) and v > 0 for v in values)
    kind = "log" if axis.get("type") == "log" and positive else "linear"
    known = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v) and (kind == "linear" or v > 0)]
    units = [math.log10(v) for v in known] if kind == "log" else known
    low, high = min(units, default=0.0), max(units, default=1.0)
    if "range" in axis:
        low, high = axis["range"]
    else:
        if axis.get("rangemode") == "tozero" or (name == "y" and any(t["type"] == "bar" for t in figure.data)):
            low, high = min(low, 0.0), max(high, 0.0)
        room = 0.05 * (high - low) or abs(high) * 0.1 or 0.5
        low, high = low - (room if low else 0.0), high + room
    return _Scale(low=low, high=high, start=start, end=end, kind=kind)


def _values(trace: Trace, name: str) -> list[Any]:
    values = list(trace.get(name, ()))
    error = trace.get("error_y")
    if name == "y" and error:
        below = error.get("arrayminus", error["array"])
        pairs = list(zip(values, error["array"], below, strict=True))
        values += [value + up for value, up, _ in pairs if value is not None]
        values += [value - down for value, _, down in pairs if value is not None]
    if name == "x" and trace["type"] == "bar" and "width" in trace:
        values += [value + side * trace["width"] / 2 for value in trace["x"] for side in (-1, 1)]
    return values


def _in_data(shape: dict[str, Any], name: str) -> bool:
    return f"{name}0" in shape and shape.get(f"{name}ref", name) != "paper"


def _axes(figure: Figure, x: _Scale, y: _Scale, top: float) -> list[str]:
    parts = []
    for value, word in _ticks(y, figure.layout.get("yaxis", {})):
        at = y.at(value)
        if at is None:
            continue
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="{_DIM}">{html.escape(word)}</text>')
    base = HEIGHT - _BOTTOM
    ticks = _ticks(x, figure.layout.get("xaxis", {}))
    for value, word in ticks:
        at = x.at(value)
        if at is None:
            continue
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}" stroke="{_DIM}"/>')
        # Names share the width of the axis and are wrapped to it.
        named = x.kind == "category" or "ticktext" in figure.layout.get("xaxis", {})
        room = int((WIDTH - _LEFT - _RIGHT) / max(1, len(x.names or ticks)) / 6.4) if named else 40
        for number, piece in enumerate(textwrap.wrap(word, max(4, room), break_long_words=False)[:3]):
            place = f'x="{at:.1f}" y="{base + 17 + 13 * number}"'
            parts.append(f'<text {place} text-anchor="middle" fill="{_DIM}">{html.escape(piece)}</text>')
    titles = [figure.layout.get(f"{name}axis", {}).get("title", {}).get("text", "") for name in "xy"]
    middle = (top + base) / 2
    return [
        *parts,
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}" stroke="{_DIM}"/>',
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{html.escape(titles[0])}</text>',
        f'<text transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle">{html.escape(titles[1])}</text>',
    ]


def _ticks(scale: _Scale, axis: dict[str, Any]) -> list[tuple[Any, str]]:
    if scale.kind == "category":
        every = math.ceil(len(scale.names) / 24)
        return [(name, name) for name in scale.names[::every]]
    if "tickvals" in axis:
        return list(zip(axis["tickvals"], axis.get("ticktext") or map(str, axis["tickvals"]), strict=True))
    if scale.kind == "log":
        first, last = math.ceil(scale.low - 1e-9), math.floor(scale.high + 1e-9)
        every = max(1, math.ceil((last - first) / 9))
        places = [10.0**power for power in range(first, last + 1, every)]
        if len(places) < 3:
            places = [m * 10.0**p for p in range(first - 1, last + 1) for m in (1, 2, 5)]
            places = [v for v in places if scale.low - 1e-9 <= math.log10(v) <= scale.high + 1e-9]
        return [
            (value, f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if value < 1e-2 else f"{value:g}")
            for value in places
        ]
    rough = (scale.high - scale.low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= rough)
    places = [step * place for place in range(math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9) + 1)]
    percent = str(axis.get("tickformat", "")).endswith(("%", "p"))
    return [(value, f"{100 * value:.4g} %" if percent else f"{value:.4g}") for value in places]


def _scatter(trace: Trace, before: Trace | None, x: _Scale, y: _Scale) -> list[str]:
    places = [(x.at(a), y.at(b)) for a, b in zip(trace["x"], trace["y"], strict=True)]
    known = [(a, b) for a, b in places if a is not None and b is not None]
    mode, line = trace.get("mode", "lines"), trace.get("line", {})
    colour = line.get("color") or _first_colour(trace.get("marker", {}).get("color"), BLUE)
    parts = []
    if trace.get("fill") == "tonexty" and before is not None:
        back = [(x.at(a), y.at(b)) for a, b in zip(before["x"], before["y"], strict=True)]
        around = [*known, *reversed([(a, b) for a, b in back if a is not None and b is not None])]
        parts.append(f'<polygon points="{_points(around)}" fill="{trace["fillcolor"]}"/>')
    if "lines" in mode and line.get("width", 2) > 0 and len(known) > 1:
        dash = _DASHES.get(line.get("dash", "solid"))
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<polyline points="{_points(known)}" fill="none" stroke="{colour}" stroke-width="{line.get("width", 2)}"'
            f' opacity="{trace.get("opacity", 1)}"{dashed}/>'
        )
    parts += _errors(trace, x, y, colour)
    if "markers" in mode:
        marker = trace.get("marker", {})
        colours, radius = marker.get("color", colour), marker.get("size", 8) / 2
        symbols = marker.get("symbol", "circle")
        for number, (a, b) in enumerate(places):
            if a is not None and b is not None:
                own = colours[number] if isinstance(colours, list | tuple) else colours
                symbol = symbols[number] if isinstance(symbols, list | tuple) else symbols
                parts.append(_marker(symbol, a, b, radius, own, marker.get("opacity", 1)))
    return parts


def _marker(symbol: str, x: float, y: float, radius: float, colour: str, opacity: float) -> str:
    if symbol in ("triangle-up", "triangle-down"):
        tip = -1.3 * radius if symbol == "triangle-up" else 1.3 * radius
        corners = [(x - 1.2 * radius, y - tip / 1.5), (x + 1.2 * radius, y - tip / 1.5), (x, y + tip)]
        return f'<polygon points="{_points(corners)}" fill="{colour}" opacity="{opacity}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}" opacity="{opacity}"/>'


def _errors(trace: Trace, x: _Scale, y: _Scale, colour: str) -> list[str]:
    error = trace.get("error_y")
    if not error:
        return []
    parts = []
    below = error.get("arrayminus", error["array"])
    for a, b, up, down in zip(trace["x"], trace["y"], error["array"], below, strict=True):
        at, top, bottom = x.at(a), y.at(b + up), y.at(b - down)
        if at is not None and top is not None:
            bottom = y.start if bottom is None else bottom
            strokes = [(at, at, top, bottom), (at - 4, at + 4, top, top), (at - 4, at + 4, bottom, bottom)]
            parts += [
                f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
                for x1, x2, y1, y2 in strokes
            ]
    return parts


def _bars(figure: Figure, number: int, x: _Scale, y: _Scale) -> list[str]:
    trace = figure.data[number]
    together = [each for each in figure.data if each["type"] == "bar"]
    place, count = together.index(trace), len(together)
    if figure.layout.get("barmode") in ("overlay", "stack") or count == 1:
        place, count = 0, 1
    known = [at for at in (x.at(value) for value in trace["x"]) if at is not None]
    gaps = [b - a for a, b in zip(sorted(known), sorted(known)[1:], strict=False) if b > a]
    room = 0.8 * min(gaps, default=abs(x.end - x.start) / max(1.0, x.high - x.low))
    if "width" in trace and x.kind == "linear":
        room = abs(x.end - x.start) * trace["width"] / (x.high - x.low)
    marker = trace.get("marker", {})
    parts = []
    zero = y.at(0.0)
    zero = y.start if zero is None else zero
    for index, (a, b) in enumerate(zip(trace["x"], trace["y"], strict=True)):
        at, top = x.at(a), y.at(b)
        if at is None or top is None:
            continue
        colour = marker.get("color", BLUE)
        colour = colour[index] if isinstance(colour, list | tuple) else colour
        left = at - room / 2 + place * room / count
        parts.append(
            f'<rect x="{left:.1f}" y="{min(top, zero):.1f}" width="{max(room / count, 0.6):.1f}"'
            f' height="{abs(zero - top):.1f}" fill="{colour}" opacity="{marker.get("opacity", 1)}"/>'
        )
    return parts


def _straight_line(shape: dict[str, Any], x: _Scale, y: _Scale, top: float) -> list[str]:
    """Draw a straight line across the figure, at one value of an axis."""
    ends = []
    for scale, name, paper in ((x, "x", (_LEFT, WIDTH - _RIGHT)), (y, "y", (HEIGHT - _BOTTOM, top))):
        ends.append([scale.at(shape[f"{name}{n}"]) if _in_data(shape, name) else float(paper[n]) for n in (0, 1)])
    (x0, x1), (y0, y1) = ends
    if None in (x0, x1, y0, y1):
        return []
    line = shape.get("line", {})
    dash = _DASHES.get(line.get("dash", "solid"), "")
    return [
        f'<line x1="{x0:.1f}" x2="{x1:.1f}" y1="{y0:.1f}" y2="{y1:.1f}" stroke="{line.get("color", _DIM)}"'
        f' stroke-width="{line.get("width", 1)}" stroke-dasharray="{dash}"/>'
    ]


def _legend(traces: Sequence[Trace]) -> tuple[list[str], int]:
    """Return the SVG elements of the legend, and its number of lines."""
    parts, at, row = [], float(_LEFT), 0
    for trace in traces:
        words = re.sub(r"<[^>]*>", "", html.unescape(str(trace["name"])))
        width = 28 + 7.2 * len(words)
        if at + width > WIDTH - _RIGHT and at > _LEFT:
            at, row = float(_LEFT), row + 1
        colour = trace.get("fillcolor") or trace.get("line", {}).get("color")
        colour = colour or _first_colour(trace.get("marker", {}).get("color"), BLUE)
        y = 36 + _LINE * row
        parts.append(f'<rect x="{at:.0f}" y="{y}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{at + 17:.0f}" y="{y + 10}" fill="{_DIM}">{html.escape(words)}</text>')
        at += width
    return parts, row + 1 if traces else 0


def _first_colour(colour: Any, otherwise: str) -> str:
    if isinstance(colour, list | tuple):
        return str(colour[0]) if colour else otherwise
    return otherwise if colour is None else str(colour)


def _points(places: Sequence[tuple[float | None, float | None]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
