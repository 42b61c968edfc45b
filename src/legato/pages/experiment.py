"""The report of an experiment: expected and measured values, as page, text, data and figures.

NAME.html            one file, offline
NAME.md              the same as text that can be pasted
NAME.json            every number
tables/SHEET.csv     each table with its numbers in full
figures/FIGURE.svg   each figure, and as .png if a tool is installed
"""

import csv
import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legato.errors import InputError
from legato.pages.comparison_tables import Table
from legato.pages.drawing import draw_svg, rasterise
from legato.pages.legible import legible
from legato.pages.mismatch import share, short
from legato.pages.page import cell, page, plotly_library
from legato.pages.traces import Figure
from legato.records.lines import finite

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One expectation beside its measurement."""

    what: str
    expected: Value
    measured: Value
    tolerance: float | None = None
    """Largest difference allowed; None: the difference is shown and not judged."""
    relative: bool = False
    """Whether difference and tolerance are shares of the expected value."""
    source: str = ""
    """Where the expectation comes from."""

    @property
    def difference(self) -> float | None:
        if not _number(self.expected) or not _number(self.measured):
            return None
        expected, measured = float(self.expected or 0), float(self.measured or 0)
        return (measured - expected) / abs(expected) if self.relative and expected else measured - expected

    @property
    def verdict(self) -> str:
        if self.tolerance is None:
            return "not judged" if self.difference is not None or self.expected is None else _same(self)
        if self.difference is None:
            return "not measured"
        return "as expected" if abs(self.difference) <= self.tolerance else "differs"


def _same(check: Check) -> str:
    return "as expected" if check.expected == check.measured else "differs"


def _number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table with its numbers in full; the first column names the rows."""

    name: str
    """Name of its CSV file."""
    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    shares: tuple[str, ...] = ()
    """Headings whose numbers are shown as per cent."""
    digits: int = 3

    def table(self) -> Table:
        """Return the table with formatted cells."""
        rows = tuple(
            tuple(self._word(heading, value) for heading, value in zip(self.headings, row, strict=True)) for row in self.rows
        )
        return Table(title=self.title, note=self.note, headings=self.headings, rows=rows)

    def _word(self, heading: str, value: Value) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if value is None or isinstance(value, str):
            return "-" if value is None else value
        if heading in self.shares:
            return share(float(value))
        return f"{value:,}" if isinstance(value, int) else short(value, self.digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The content of the page of one experiment."""

    name: str
    title: str
    about: str
    """What was done, in a paragraph."""
    facts: Mapping[str, str]
    sentences: Sequence[str]
    """The results, most important first."""
    checks: Sequence[Check] = ()
    sheets: Sequence[Sheet] = ()
    figures: Sequence[Figure] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """What NAME.json holds beside checks and sheets."""
    extra: str = ""
    """HTML of the experiment's own, escaped already."""

    def check_table(self) -> Table | None:
        """Return expectations and measurements as a table; None without any."""
        if not self.checks:
            return None
        rows = tuple(
            (
                check.what,
                _format_value(check.expected),
                _format_value(check.measured),
                "-" if check.difference is None else share(check.difference) if check.relative else short(check.difference),
                "-" if check.tolerance is None else share(check.tolerance) if check.relative else short(check.tolerance),
                check.verdict,
                check.source,
            )
            for check in self.checks
        )
        headings = ("", "expected", "measured", "difference", "allowed", "verdict", "from")
        return Table(title="Expected and measured", note="", headings=headings, rows=rows)

    def tables(self) -> list[Table]:
        first = self.check_table()
        return [*([] if first is None else [first]), *(sheet.table() for sheet in self.sheets)]


def _format_value(value: Value) -> str:
    if isinstance(value, float):
        return short(value, 6)
    return "-" if value is None else str(value)


def write(folder: Path, account: Account, *, png: bool = True) -> list[Path]:
    """Write page, text, data, tables and figures; return the files, the page first."""
    try:
        for name in ("tables", "figures"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder} is not a folder that can be written: {error.strerror}") from None
    text = page(
        title=f"{account.title} - Legato",
        head=_head(account),
        body=account.extra + "".join(_table(each) for each in account.tables()[1 if account.checks else 0 :]),
        drawn=list(account.figures),
        plotly=plotly_library(),
        no_figures="",
    )
    files = [folder / f"{account.name}.{ending}" for ending in ("html", "md", "json")]
    files[0].write_text(text, encoding="utf-8")
    files[1].write_text(markdown(account), encoding="utf-8")
    files[2].write_text(json.dumps(finite(content(account)), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for sheet in account.sheets:
        files.append(folder / "tables" / f"{sheet.name}.csv")
        with files[-1].open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([sheet.headings, *sheet.rows])
    for figure in account.figures:
        svg = folder / "figures" / f"{file_stem(figure.title)}.svg"
        svg.write_text(draw_svg(figure), encoding="utf-8")
        files += [svg, *([png_file] if png and (png_file := rasterise(svg)) is not None else [])]
    return files


def content(account: Account) -> dict[str, Any]:
    """Return the content of NAME.json."""
    return {
        "experiment": account.name,
        "title": account.title,
        "about": account.about,
        "facts": dict(account.facts),
        "sentences": list(account.sentences),
        "checks": [
            {
                "what": check.what,
                "expected": check.expected,
                "measured": check.measured,
                "difference": check.difference,
                "relative": check.relative,
                "tolerance": check.tolerance,
                "verdict": check.verdict,
                "source": check.source,
            }
            for check in account.checks
        ],
        "tables": {
            sheet.name: {
                "title": sheet.title,
                "note": sheet.note,
                "headings": list(sheet.headings),
                "rows": [list(row) for row in sheet.rows],
                "shares": list(sheet.shares),
                "digits": sheet.digits,
            }
            for sheet in account.sheets
        },
        "data": dict(account.data),
    }


def read(stored: Mapping[str, Any]) -> Account:
    """Read an account back from the content of NAME.json, without its figures."""
    fields = ("what", "expected", "measured", "tolerance", "relative", "source")
    return Account(
        name=stored["experiment"],
        title=stored["title"],
        about=stored["about"],
        facts=stored["facts"],
        sentences=stored["sentences"],
        checks=[Check(**{key: check[key] for key in fields}) for check in stored["checks"]],
        sheets=[
            Sheet(
                name=name,
                title=sheet["title"],
                note=sheet["note"],
                headings=tuple(sheet["headings"]),
                rows=tuple(map(tuple, sheet["rows"])),
                shares=tuple(sheet["shares"]),
                digits=sheet["digits"],
            )
            for name, sheet in stored["tables"].items()
        ],
        data=stored["data"],
    )


def markdown(account: Account, figures: str = "figures") -> str:
    """Return the account as Markdown; figures are linked from the folder `figures`, or left out if that is empty."""
    facts = ", ".join(f"{name} {value}" for name, value in account.facts.items())
    pieces = [f"# {_cell(account.title)}", "", account.about, "", f"{_cell(facts)}.", ""]
    pieces += [f"- {_cell(each)}" for each in account.sentences]
    pieces += tables_as_text(account.tables())
    if figures:
        for figure in account.figures:
            pieces += ["", f"![{_cell(figure.title)}]({figures}/{file_stem(figure.title)}.svg)", "", _cell(figure.caption)]
    return "\n".join(pieces) + "\n"


def tables_as_text(tables: Sequence[Table], level: int = 2) -> list[str]:
    """Return tables as lines of Markdown."""
    pieces: list[str] = []
    for each in tables:
        pieces += ["", f"{'#' * level} {_cell(each.title)}", ""]
        pieces += [_cell(each.note), ""] if each.note else []
        pieces += [f"| {' | '.join(map(_cell, each.headings))} |", "|" + "---|" * len(each.headings)]
        pieces += [f"| {' | '.join(map(_cell, row))} |" for row in each.rows]
    return pieces


def file_stem(title: str) -> str:
    """Turn a title into a file name without extension."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _head(account: Account) -> str:
    facts = "".join(f"<span>{_safe(name)} <b>{_safe(value)}</b></span>" for name, value in account.facts.items())
    items = "".join(f"<li>{_safe(each)}</li>" for each in account.sentences)
    checks = account.check_table()
    return (
        f'<header><h1>{_safe(account.title)}</h1><div class="facts">{facts}</div><p>{_safe(account.about)}</p>'
        f'<div class="card"><ul>{items}</ul></div></header>{"" if checks is None else _table(checks)}'
    )


def _table(table: Table) -> str:
    colours = defaultdict(str, {"differs": "bad", "as expected": "good"})
    head = "".join(f"<th>{_safe(word)}</th>" for word in table.headings)
    rows = ""
    for row in table.rows:
        cells = "".join(cell(_safe(word), colours[word]) for word in row)
        rows += f"<tr>{cells}</tr>"
    note = f'<p class="dim">{_safe(table.note)}</p>' if table.note else ""
    return (
        f"<section><h2>{_safe(table.title)}</h2>{note}"
        f'<div class="card rows"><table><tr>{head}</tr>{rows}</table></div></section>'
    )


def _cell(text: str) -> str:
    return legible(text, one_line=True).replace("|", "\\|")


def _safe(text: str) -> str:
    return html.escape(legible(text, one_line=True))
