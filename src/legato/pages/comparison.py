"""Writes `compare.html`, a comparison as one offline page, and `compare.md`, the same as text."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.pages.comparison_figures import figures
from legato.pages.comparison_tables import Results, Table, sentences, tables
from legato.pages.legible import legible
from legato.pages.page import page, plotly_library

_UNLIKE = "The arms do not share problems, weights and budget:"


def write_pages(folder: Path, results: Results) -> None:
    """Write both files from the content of compare.json."""
    shown = tables(results)
    text = page(
        title=f"{legible(results['name'], one_line=True)} - Legato",
        head=_head(results, shown),
        body="".join([_arms(results), _runs(results), _terms(results)]),
        drawn=figures(results),
        plotly=plotly_library(),
    )
    for name, content in (("compare.html", text), ("compare.md", _markdown(results, shown))):
        partial = folder / f".{name}.partial"
        partial.write_text(content, encoding="utf-8")
        partial.replace(folder / name)


def _head(results: Results, listed: Sequence[Table]) -> str:
    facts = {
        "model": results["model"],
        "task": results["task"],
        "arms": ", ".join(results["arms"]),
        "seeds": ", ".join(map(str, results["seeds"])),
        "recipe": ", ".join(results["recipes"]) or "defaults",
    }
    spans = "".join(f"<span>{name} <b>{_safe(value)}</b></span>" for name, value in facts.items())
    paragraphs = "".join(f'<p class="verdict">{_safe(each)}</p>' for each in sentences(results))
    unlike = "".join(f"<li>{_safe(each)}</li>" for each in results["unequal"])
    warning = f'<div class="card"><b class="bad">{_UNLIKE}</b><ul>{unlike}</ul></div>' if unlike else ""
    shown = "".join(_table(each) for each in listed)
    return f'<header><h1>{_safe(results["name"])}</h1><div class="facts">{spans}</div>{paragraphs}{warning}</header>{shown}'


def _table(table: Table) -> str:
    head = "".join(f"<th>{_safe(word)}</th>" for word in table.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{_safe(word)}</td>' for word in row)}</tr>" for row in table.rows)
    return (
        f'<section><h2>{_safe(table.title)}</h2><p class="dim">{_safe(table.note)}</p>'
        f'<div class="card rows"><table><tr>{head}</tr>{rows}</table></div></section>'
    )


def _arms(results: Results) -> str:
    items = []
    for arm in results["arms"]:
        run = next(run for run in results["runs"] if run["arm"] == arm)
        changes = ", ".join(f"{path} = {_value(value)}" for path, value in results["changes"][arm].items()) or "nothing"
        unlike = "; ".join(run["deviations"])
        paper = f". Deviates from the paper: {unlike}" if unlike else ""
        items.append(f"<li><b>{_safe(arm)}</b> changes {_safe(changes + paper)}</li>")
    return f'<section><h2>Arms</h2><div class="card"><ul>{"".join(items)}</ul></div></section>'


def _runs(results: Results) -> str:
    headings = ("run", "status", "start", "best", "end", "greedy", "steps", "updates", "tokens", "seconds")
    rows = tuple(
        (
            run["name"],
            run["status"],
            *("-" if run[key] is None else f"{100 * run[key]:.1f} %" for key in ("start", "best", "score", "greedy")),
            *(f"{run[key]:,.0f}" for key in ("steps", "updates", "tokens", "seconds")),
        )
        for run in results["runs"]
    )
    note = "Each is an ordinary run directory below runs/, with a report of its own."
    return _table(Table(title="Every run", note=note, headings=headings, rows=rows))


def _terms(results: Results) -> str:
    terms = [
        *results["definitions"].values(),
        "Intervals are the middle 95 % of resampled seeds (percentile bootstrap, the same seeds drawn from both arms)."
        " With few seeds they are too narrow: docs/compare.md says by how much.",
        "The interquartile mean is the mean of the middle half of the seeds.",
        "P is over all pairs of seeds; a tie counts half.",
    ]
    items = "".join(f"<li>{_safe(each)}</li>" for each in terms)
    return f'<section><h2>What the words mean</h2><div class="card"><ul>{items}</ul></div></section>'


def _markdown(results: Results, listed: Sequence[Table]) -> str:
    pieces = [f"# {_cell(results['name'])}", "", *(f"{_cell(each)}" for each in sentences(results))]
    if results["unequal"]:
        pieces += ["", _UNLIKE, *(f"- {_cell(each)}" for each in results["unequal"])]
    for each in listed:
        pieces += ["", f"## {_cell(each.title)}", "", _cell(each.note), ""]
        pieces += [f"| {' | '.join(map(_cell, each.headings))} |", "|" + "---|" * len(each.headings)]
        pieces += [f"| {' | '.join(map(_cell, row))} |" for row in each.rows]
    return "\n".join(pieces) + "\n"


def _value(value: Any) -> str:
    return ", ".join(f"{key} = {each}" for key, each in value.items()) if isinstance(value, Mapping) else str(value)


def _cell(text: str) -> str:
    return legible(text, one_line=True).replace("|", "\\|")


def _safe(text: str) -> str:
    return html.escape(legible(text, one_line=True))
