"""Prints tables on terminals of any width. Words and numbers are never broken; columns that do not fit follow below."""

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from legato.pages.comparison_tables import Table as PageTable
from legato.pages.legible import legible

_BETWEEN = 2
"""Cells between two columns."""


def show_table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, split into parts if it is too wide. Every part repeats the first column, which names the rows."""
    columns = [[legible(word, one_line=True) for word in column] for column in zip(headings, *rows, strict=True)]
    least = [max(cell_len(word) for cell in column for word in ["", *cell.split()]) for column in columns]
    whole = [max(map(cell_len, column)) for column in columns]
    for part, places in enumerate(_parts(least, console.width)):
        table = Table(
            title=None if part else Text(title),
            title_justify="left",
            box=None,
            pad_edge=False,
            padding=(0, _BETWEEN, 0, 0),
            header_style="dim",
        )
        spare = console.width - _width(places, least)
        for place in places:
            more = max(0, min(spare, whole[place] - least[place]))
            spare -= more
            table.add_column(
                Text(columns[place][0]), width=least[place] + more, justify="right" if place else "left", overflow="fold"
            )
        for row in range(1, len(columns[0])):
            table.add_row(*(Text(columns[place][row]) for place in places))
        if part:
            console.print()
        console.print(table)


def show_tables(console: Console, tables: Iterable[PageTable]) -> None:
    """Print the tables of a page, each with its note below."""
    for each in tables:
        console.print()
        show_table(console, each.title, each.headings, each.rows)
        console.print(Text(each.note, style="dim"))


def _width(places: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[place] for place in places) + _BETWEEN * (len(places) - 1)


def _parts(least: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield groups of column numbers that fit beside each other: the first column and at least one more."""
    part = [0]
    for place in range(1, len(least)):
        if len(part) > 1 and _width([*part, place], least) > width:
            yield part
            part = [0]
        part.append(place)
    yield part
