"""The table of evaluation sets: a row for each set and measure, a column for each checkpoint, with 95 % intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from legato.diagnostics.statistics.intervals import difference_interval
from legato.pages.legible import legible
from legato.run.evaluate import SetResult


def print_sets(results: Mapping[str, Sequence[SetResult]], console: Console | None = None) -> None:
    """Print the results of one or several targets. Two targets also get their difference, paired by problem."""
    console = console or Console(highlight=False)
    table = Table(title="evaluation sets, % with 95 % intervals over problems", title_justify="left")
    for heading in ("set", "measure", "problems", *(_short(target) for target in results)):
        table.add_column(legible(heading, one_line=True), overflow="fold")
    if len(results) == 2:
        table.add_column("difference")
    columns = list(results.values())
    for row in zip(*columns, strict=True):
        for measure in _names_to_show(row[0]):
            cells = [_cell(each, measure) for each in row]
            if len(results) == 2:
                cells.append(_difference(row[0], row[1], measure))
            first = measure == _names_to_show(row[0])[0]
            table.add_row(row[0].name if first else "", measure, str(len(row[0].keys)) if first else "", *cells)
    if len(columns[0]) > 1:
        means = [sum(_row(each, _names_to_show(each)[0]).value for each in column) / len(column) for column in columns]
        change = [f"{100 * (means[1] - means[0]):+.1f}"] if len(means) == 2 else []
        table.add_section()
        table.add_row("mean of avg@n", "", "", *(f"{100 * mean:.1f}" for mean in means), *change)
    console.print(table)
    unscorable = sum(each.unscorable for column in columns for each in column)
    if unscorable:
        console.print(f"{unscorable} responses could not be scored and count as wrong")


def sets_record(results: Sequence[SetResult]) -> dict[str, Any]:
    """The results of one target for JSON."""
    return {
        each.name: {
            "problems": len(each.keys),
            "unscorable": each.unscorable,
            "measures": {row.name: {"value": row.value, "low": row.low, "high": row.high} for row in each.rows},
        }
        for each in results
    }


def _short(target: str) -> str:
    """The last folders of a long path: enough to tell two runs apart."""
    return target if len(target) <= 24 else str(Path(*Path(target).parts[-2:]))


def _names_to_show(result: SetResult) -> list[str]:
    """avg@n, and pass@k for the largest k."""
    names = [row.name for row in result.rows]
    return [names[0], *names[1:][-1:]]


def _row(result: SetResult, measure: str) -> Any:
    return next(row for row in result.rows if row.name == measure)


def _cell(result: SetResult, measure: str) -> str:
    row = _row(result, measure)
    return f"{100 * row.value:.1f} ({100 * row.low:.1f} to {100 * row.high:.1f})"


def _difference(before: SetResult, after: SetResult, measure: str) -> str:
    if before.keys != after.keys:
        return "-"
    mean, low, high = difference_interval(before.values[measure], after.values[measure])
    return f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
