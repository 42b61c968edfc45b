"""The page of `legato mismatch`: one file, figures drawn as SVG, nothing fetched and no script."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from legato.pages.page import STYLE

Results = Mapping[str, Any]

_OWN_STYLE = """
.card { margin-top: 16px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--dim); font-weight: 600; } .scroll { overflow-x: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .dim { fill: var(--dim); }
svg .grid { stroke: var(--grid); } svg .bar { fill: var(--accent); opacity: .45; } svg .middle { fill: var(--accent); }
svg .most { stroke: var(--accent); stroke-width: 2; } svg .bound { stroke: var(--bad); stroke-width: 1.5; }
"""


def page(result: Results) -> str:
    """Return the HTML page of a result of `compare_samplers`."""
    samplers: Results = result["samplers"]
    floors = [each["floor"] for each in samplers.values()]
    band = next((floor["band"] for floor in floors if floor["band"] is not None), None)
    facts = "".join(
        f"<span>{word} <b>{html.escape(str(result[key]))}</b></span>"
        for key, word in (("model", "model"), ("dtype", "weights"), ("task", "task"), ("algorithm", "algorithm"))
    )
    bounds = [] if band is None else [(band / 3, "a third of the band"), (band, "clip band")]
    responses = {name: each["response_size"] for name, each in samplers.items()}
    tokens = {name: each["token_size"] for name, each in samplers.items()}
    body = "\n".join(
        [
            "<h1>Samplers that differ from the trainer</h1>",
            f'<div class="facts">{facts}</div>',
            f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in verdicts(result))}</ul>",
            _card(
                "Gap of a response, |log Geo|, beside the clip band (truncation included)", draw_strips(responses, bounds)
            ),
            _card("Gap of a token: |old - behaviour|", draw_strips(tokens, [])),
            _card("old - behaviour: distribution, divergence, effective sizes", table(*gap_rows(samplers))),
            _card("Noise floor beside the clip band", table(*floor_rows(samplers))),
            "<h2>What each correction does to the weights</h2>",
            *(_card(name, table(*correction_rows(each))) for name, each in samplers.items()),
            "<h2>By length: share cut</h2>",
            *(_card(name, table(*length_rows(each))) for name, each in samplers.items()),
        ]
    )
    safety = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{safety}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Samplers that differ from the trainer</title>
<style>{STYLE}{_OWN_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _card(title: str, inside: str) -> str:
    return f'<figure class="card"><h3>{html.escape(title)}</h3><div class="scroll">{inside}</div></figure>'


def verdicts(result: Results) -> list[str]:
    """Say for each sampler whether its log-probs may be the anchor, with the numbers."""
    lines = []
    for name, each in result["samplers"].items():
        floor = each["floor"]
        if floor["band"] is None:
            lines.append(
                f"{name}: {result['algorithm']} has no clip band; what differs is |log s| up to {short(floor['max'])}"
            )
            continue
        word = (
            'anchor = "sampler" is safe'
            if floor["safe"]
            else 'anchor = "sampler" is not safe: the anchor must be recomputed'
        )
        lines.append(
            f"{name}: {word} ({short(floor['bounded'])} beside a third of the band, {short(floor['band'] / 3)};"
            f" {share(floor['clipped'])} outside the band before any update)"
        )
    return lines


Rows = tuple[Sequence[str], list[list[str]]]
"""Headings, and cells row by row."""


def gap_rows(samplers: Results) -> Rows:
    """Return the distribution of the gap per token and per response, divergences and effective sample sizes."""
    headings = (
        *("sampler", "mean", "sd", "p01", "p99", "max |.|", "response sd", "response max |.|"),
        *("k1", "k3", "chi2 token", "chi2 response", "ESS/N token", "ESS/N response"),
    )
    rows = []
    for name, each in samplers.items():
        token, response, divergence = each["token_gap"], each["response_gap"], each["divergence"]
        numbers = [token[key] for key in ("mean", "deviation", "p01", "p99")]
        numbers += [each["token_size"]["greatest"], response["deviation"], each["response_size"]["greatest"]]
        numbers += [divergence[key] for key in ("k1", "k3", "chi2_token", "chi2_sequence")]
        sizes = [divergence["effective_size"], divergence["effective_sequence"]]
        rows.append([name, *map(short, numbers), *map(share, sizes)])
    return headings, rows


def floor_rows(samplers: Results) -> Rows:
    """Return the noise floor of log s for each sampler."""
    headings = ("sampler", "rms |log s|", "max |log s|", "of what is clipped", "a third of the band", "clipped", "anchor")
    rows = []
    for name, each in samplers.items():
        floor = each["floor"]
        third = None if floor["band"] is None else floor["band"] / 3
        word = {True: "sampler is safe", False: "recompute", None: "no band"}[floor["safe"]]
        numbers = [short(floor[key]) for key in ("rms", "max", "bounded")]
        rows.append([name, *numbers, short(third), share(floor["clipped"]), word])
    return headings, rows


def correction_rows(each: Results) -> Rows:
    """Return the effect of every correction on the weights of one sampler."""
    headings = ("correction", "of", "mean weight", "cut", "ESS/N", "bias of the mean")
    rows = [
        [
            name,
            effect["unit"],
            short(effect["mean"], 4),
            share(effect["cut"]),
            share(effect["effective"]),
            short(effect["bias"]),
        ]
        for name, effect in each["corrections"].items()
    ]
    return headings, rows


def length_rows(each: Results) -> Rows:
    """Return the share that each correction cuts, by length of the response."""
    bins = each["by_length"]
    headings = ("", *(f"{b['shortest']} to {b['longest']} tokens" for b in bins))
    rows = [
        ["responses", *(str(b["responses"]) for b in bins)],
        ["sd of log Geo", *(short(b["gap_deviation"]) for b in bins)],
        ["ESS/N of the product", *(share(b["effective_product"]) for b in bins)],
    ]
    names = bins[0]["cut"] if bins else []
    rows += [[name, *(share(b["cut"][name]) for b in bins)] for name in names if not name.endswith("uncapped")]
    return headings, rows


def short(value: float | None, digits: int = 2) -> str:
    """Format a number in few characters; a dash if there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return "0" if value == 0 else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """Format a share in per cent."""
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.3g} %"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as HTML."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


_LEFT, _WIDE, _ROW, _TOP = 130, 760, 26, 34


def draw_strips(sizes: Mapping[str, Results], bounds: Sequence[tuple[float, str]]) -> str:
    """Draw a strip from the 5th to the 95th percentile for each row, on a logarithmic axis, with median and maximum."""
    positive = [size[key] for size in sizes.values() for key in ("p05", "greatest") if size.get(key, 0) > 0]
    positive += [bound for bound, _ in bounds]
    if not positive:
        return '<p class="dim">There is no gap at all.</p>'
    least = max(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) - 9)
    most = max(math.ceil(math.log10(max(positive))), least + 1)

    def at(value: float) -> float:
        place = (math.log10(value) - least) / (most - least) if value > 0 else 0.0
        return _LEFT + _WIDE * min(max(place, 0.0), 1.0)

    height = _TOP + _ROW * len(sizes) + 8
    parts = [f'<svg viewBox="0 0 {_LEFT + _WIDE + 40} {height}" width="100%" role="img">']
    for power in range(least, most + 1):
        x = at(10.0**power)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height - 4}"/>')
        parts.append(f'<text class="dim" x="{x:.1f}" y="{_TOP - 12}" text-anchor="middle">1e{power}</text>')
    for place, (name, size) in enumerate(sizes.items()):
        y = _TOP + _ROW * place
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>')
        if not size.get("greatest", 0) > 0:
            parts.append(f'<text class="dim" x="{_LEFT + 4}" y="{y + 15}">0</text>')
            continue
        low, middle, high, top = (at(size[key]) for key in ("p05", "p50", "p95", "greatest"))
        parts += [
            f'<rect class="bar" x="{low:.1f}" y="{y + 5}" width="{max(high - low, 1):.1f}" height="{_ROW - 12}" rx="3"/>',
            f'<circle class="middle" cx="{middle:.1f}" cy="{y + 12}" r="4"/>',
            f'<line class="most" x1="{top:.1f}" x2="{top:.1f}" y1="{y + 3}" y2="{y + _ROW - 5}"/>',
        ]
    for bound, words in bounds:
        x = at(bound)
        parts.append(
            f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{height - 4}"><title>{html.escape(words)}'
            f" {short(bound)}</title></line>"
        )
    caption = "Strip: 5 to 95 %; dot: median; line: greatest." + (
        " Red: a third of the clip band, and the band." if bounds else ""
    )
    return "\n".join([*parts, "</svg>", f"<figcaption>{caption}</figcaption>"])
