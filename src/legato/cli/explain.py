"""`legato explain`: an algorithm as a person would want it told."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import Entry, algorithm_names, entry
from legato.algorithms.cautions import cautions
from legato.algorithms.override import differences, flatten
from legato.core.parts import Part
from legato.surface import algorithm

_NEIGHBOURS = ("gspo", "grpo")
"""The members everybody knows: every other one is told by how it differs from them."""

console = Console(highlight=False)


def explain_all() -> None:
    """The table of all algorithms."""
    table = Table("name", "ratio", "trust", "aggregate", "advantage", "paper", title="Algorithms", title_justify="left")
    for name in algorithm_names():
        found = entry(name)
        value = found.value
        table.add_row(
            name if found.verified else f"{name} *",
            ratio_words(value),
            trust_words(value),
            value.aggregate.name,
            value.advantage.name,
            escape(found.paper),
        )
    console.print(table)
    console.print("* not verified in every constant.  legato explain NAME tells one, legato explain NAME NAME compares.")


def explain_one(name: str, changes: Sequence[str]) -> None:
    """One algorithm in full."""
    found, value = _changed(name, changes)
    console.print(f"[bold]{name}[/bold]  {escape(found.title)}")
    console.print(f"{escape(found.paper)}\n")
    for line in found.formula.splitlines():
        console.print(f"    {escape(line)}", soft_wrap=True)
    if found.remarks:
        console.print(f"\n{escape(found.remarks)}")
    console.print()
    console.print(_parts_table(value))
    _print_deviations(found.value, value)
    console.print("\n[bold]Beware[/bold]")
    for caution in cautions(value):
        console.print(f"  - {escape(caution)}")
    for other in _NEIGHBOURS:
        if other != name:
            _print_differences([value, entry(other).value], title=f"Differs from {other} in")


def explain_several(names: Sequence[str], changes: Sequence[str]) -> None:
    """Several algorithms side by side: formulas, then only what differs."""
    values = []
    for name in names:
        found, value = _changed(name, changes)
        values.append(value)
        console.print(f"[bold]{name}[/bold]  {escape(found.title)}")
        for line in found.formula.splitlines():
            console.print(f"    {escape(line)}", soft_wrap=True)
        console.print()
    _print_differences(values, title="Where they differ")
    console.print("\n[bold]Beware[/bold]")
    for value in values:
        for caution in cautions(value):
            console.print(f"  - {value.name}: {escape(caution)}")


def _changed(name: str, changes: Sequence[str]) -> tuple[Entry, Algorithm]:
    found = entry(name)
    return found, algorithm(name, dict(_parse(change) for change in changes))


def _parse(change: str) -> tuple[str, Any]:
    """`path=value`; the value is JSON where it reads as such, otherwise a word."""
    path, equals, text = change.partition("=")
    if not equals:
        raise ValueError(f"--set {change!r} is not an override; path=value is, as in objective.trust.clip.low=0.002")
    try:
        return path.strip(), json.loads(text)
    except json.JSONDecodeError:
        return path.strip(), text.strip()


def _parts(value: Algorithm) -> list[tuple[str, Part]]:
    return [
        ("advantage", value.advantage),
        *(("filters", part) for part in value.filters),
        ("objective.ratio", value.objective.ratio),
        *(("objective.trust", part) for part in value.objective.trust),
        *(("objective.corrections", part) for part in value.objective.corrections),
        *(("objective.penalties", part) for part in value.objective.penalties),
        ("aggregate", value.aggregate),
    ]


def _parts_table(value: Algorithm) -> Table:
    """Every slot with its part, every field with its value and its sentence."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for slot, part in _parts(value):
        table.add_row(f"[bold]{slot}[/bold]", f"[bold]{part.name}[/bold]", escape(_first_sentence(part)))
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            table.add_row(f"    {field.name}", _words(getattr(part, field.name)), escape(field.metadata.get("says", "")))
    for path, setting in value.settings.items():
        table.add_row(f"[bold]{path}[/bold]", str(setting), "default of a run with this algorithm")
    return table


def _first_sentence(part: Part) -> str:
    return " ".join((part.__doc__ or "").split("\n\n")[0].split())


def _print_deviations(published: Algorithm, value: Algorithm) -> None:
    changed = differences(published, value)
    if changed:
        console.print("\n[bold]Deviates from the named algorithm[/bold]")
        for path, (before, after) in changed.items():
            console.print(f"  {path}: {escape(str(before))} -> {escape(str(after))}")


def _print_differences(values: Sequence[Algorithm], title: str) -> None:
    flat = [flatten(value) for value in values]
    paths = dict.fromkeys(path for each in flat for path in each)
    table = Table("", *(value.name for value in values), title=title, title_justify="left")
    for path in paths:
        cells = [_words(each[path]) if path in each else "-" for each in flat]
        if len(set(cells)) > 1:
            table.add_row(path, *map(escape, cells))
    console.print()
    console.print(table if table.row_count else f"{title}: nothing")


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def ratio_words(value: Algorithm) -> str:
    """The ratio in two words, for tables."""
    ratio = value.objective.ratio
    words = {"none": "none", "product": "product", "product-weight": "product, as weight", "group-expectation": "group"}
    if ratio.name in words:
        return words[ratio.name]
    suffix = {"through": "", "carrier": ", carrier", "weight": ", as weight"}[ratio.gradient]
    return f"{ratio.level}{suffix}"


def trust_words(value: Algorithm) -> str:
    """The trust region in a few words, for tables."""
    described = []
    for part in value.objective.trust:
        numbers = [
            getattr(part, f.name)
            for f in dataclasses.fields(part)  # type: ignore[arg-type]
            if isinstance(getattr(part, f.name), float)
            and f.name in ("low", "high", "log_low", "log_high", "cap", "threshold")
        ]
        described.append(" ".join([part.name, "/".join(f"{n:g}" for n in numbers)]).strip())
    return ", ".join(described) or "none"
