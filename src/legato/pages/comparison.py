"""Writes `compare.html`, a comparison as one offline page, and `compare.md`, the same as text."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.pages.comparison_figures import figures
from legato.pages.comparison_tables import Results, Table, sentences, tables
from legato.pages.legible import legible
from legato.pages.page import cell, page, plotly_library

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
    write_files(folder, {"compare.html": text, "compare.md": _markdown(results, shown)})


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Write files that a reader never sees half written."""
    for name, content in contents.items():
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
    spans = "".join(f"<span>{name} <b>{escape(value)}</b></span>" for name, value in facts.items())
    paragraphs = "".join(f'<p class="verdict">{escape(each)}</p>' for each in sentences(results))
    unlike = "".join(f"<li>{escape(each)}</li>" for each in results["unequal"])
    warning = f'<div class="card"><b class="bad">{_UNLIKE}</b><ul>{unlike}</ul></div>' if unlike else ""
    shown = "".join(table_html(each) for each in listed)
    return f'<header><h1>{escape(results["name"])}</h1><div class="facts">{spans}</div>{paragraphs}{warning}</header>{shown}'


def table_html(table: Table) -> str:
    """A table as a section of a page."""
    head = "".join(f"<th>{escape(word)}</th>" for word in table.headings)
    rows = "".join(f"<tr>{''.join(cell(escape(word)) for word in row)}</tr>" for row in table.rows)
    return (
        f'<section><h2>{escape(table.title)}</h2><p class="dim">{escape(table.note)}</p>'
        f'<div class="card rows"><table><tr>{head}</tr>{rows}</table></div></section>'
    )


def _arms(results: Results) -> str:
    items = []
    for arm in results["arms"]:
        run = next(run for run in results["runs"] if run["arm"] == arm)
        changes = ", ".join(f"{path} = {_value(value)}" for path, value in results["changes"][arm].items()) or "nothing"
        unlike = "; ".join(run["deviations"])
        paper = f". Deviates from the paper: {unlike}" if unlike else ""
        items.append(f"<li><b>{escape(arm)}</b> changes {escape(changes + paper)}</li>")
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
    return table_html(Table(title="Every run", note=note, headings=headings, rows=rows))


def _terms(results: Results) -> str:
    terms = [
        *results["definitions"].values(),
        "Intervals are the middle 95 % of resampled seeds (percentile bootstrap, the same seeds drawn from both arms)."
        " With few seeds they are too narrow: docs/compare.md says by how much.",
        "The interquartile mean is the mean of the middle half of the seeds.",
        "P is over all pairs of seeds; a tie counts half.",
    ]
    items = "".join(f"<li>{escape(each)}</li>" for each in terms)
    return f'<section><h2>What the words mean</h2><div class="card"><ul>{items}</ul></div></section>'


def _markdown(results: Results, listed: Sequence[Table]) -> str:
    pieces = [f"# {_cell(results['name'])}", "", *(f"{_cell(each)}" for each in sentences(results))]
    if results["unequal"]:
        pieces += ["", _UNLIKE, *(f"- {_cell(each)}" for each in results["unequal"])]
    return "\n".join([*pieces, *tables_markdown(listed)]) + "\n"


def tables_markdown(listed: Sequence[Table]) -> list[str]:
    """Tables as lines of Markdown, each below a heading."""
    lines = []
    for each in listed:
        lines += ["", f"## {_cell(each.title)}", "", _cell(each.note), ""]
        lines += [f"| {' | '.join(map(_cell, each.headings))} |", "|" + "---|" * len(each.headings)]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in each.rows]
    return lines


def _value(value: Any) -> str:
    return ", ".join(f"{key} = {each}" for key, each in value.items()) if isinstance(value, Mapping) else str(value)


def _cell(text: str) -> str:
    return legible(text, one_line=True).replace("|", "\\|")


def escape(text: str) -> str:
    """Text that may stand in a page."""
    return html.escape(legible(text, one_line=True))
