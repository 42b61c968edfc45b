"""`legato explain`: prints the formula, values, inputs and cautions of an algorithm or a part."""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import Entry, algorithm_names, entry
from legato.algorithms.cautions import cautions
from legato.algorithms.override import differences, flatten, parts_of
from legato.api import algorithm
from legato.cli.options import all_paths, known_names
from legato.config.peers import describe_key, find_key
from legato.config.sources import read_word
from legato.core.importing import code_at, is_import_path
from legato.core.parts import Part, lookup, names, nearest, part_at
from legato.core.slots import ONE
from legato.errors import InputError

SLOTS = {
    "ratio": "objective.ratio",
    "trust": "objective.trust",
    "correction": "objective.corrections",
    "penalty": "objective.penalties",
    "aggregate": "aggregate",
    "advantage": "advantage",
    "filter": "filters",
}
"""Kind of a part -> the slot of an algorithm that holds it."""

LEGEND = (
    "N responses, L_i tokens of response i; new, old: log-probs under the policy and the anchor; lw_it = new_it - old_it;"
    " w_it = exp(lw_it); s_i = exp(mean_t lw_it); W_i = exp(sum_t lw_it); A: advantage; sg[.]: stop-gradient;"
    " CLIP(r, A) = min(r A, clamp(r, 1 - low, 1 + high) A). J is maximised, the loss is -J."
)

console = Console(highlight=False)


def explain_all() -> None:
    """Print all algorithms, then all parts, one line each."""
    table = _grid("name", "ratio", "trust region", "aggregate")
    for name in algorithm_names():
        published = entry(name)
        star = "" if published.verified else " *"
        table.add_row(
            name + star, ratio_words(published.value), trust_words(published.value), published.value.aggregate.name
        )
    console.print(table)
    console.print("* not verified in every constant.\n")
    table = _grid("slot", "parts that can stand in it")
    for kind, slot in SLOTS.items():
        table.add_row(slot, ", ".join(names(kind)))
    console.print(table)
    console.print(
        "\nlegato explain NAME explains an algorithm, a part, a task, a reward, an engine or an option (training.lr);"
        " two algorithms are compared; --set algorithm.PATH=VALUE changes one."
    )


def explain_one(name: str, changes: Sequence[str]) -> None:
    """Print one algorithm in full, every part of that name, or the user's own part at an import path."""
    if is_import_path(name):
        _print_part(part_at(name), name)
        return
    parts = [lookup(kind, name) for kind in SLOTS if name in names(kind)]
    if name not in algorithm_names() and parts:
        for part in parts:
            _print_part(part, name)
        return
    if name not in algorithm_names():
        key = find_key(tuple(name.split(".")))
        words = (
            nearest(name, [*known_names(), *(all_paths() if "." in name else [])]).partition(" Known:")[0]
            if key is None
            else describe_key(*key)
        )
        raise InputError(f"unknown name {name!r}; {words}; legato explain lists the names, and options are as training.lr")
    published, value = _override(name, changes)
    console.print(f"[bold]{name}[/bold]  {escape(published.title)}  [dim]{escape(published.paper)}[/dim]\n")
    _print_formula(published)
    if value != published.value:
        console.print("    [dim](as published; the changes are listed below)[/dim]")
    if published.remarks:
        console.print(f"\n{escape(published.remarks)}")
    console.print(f"\n[dim]{escape(LEGEND)}[/dim]\n")
    console.print(_parts_table(value))
    console.print(f"\n[bold]Reads[/bold] {', '.join(inputs(value))}")
    _print_deviations(published.value, value)
    console.print("\n[bold]Beware[/bold]")
    _print_list(cautions(value))
    other = "gspo" if value.objective.ratio.level == "sequence" else "grpo"
    other = {"gspo": "grpo", "grpo": "gspo"}[other] if other == name else other
    _print_differences([value, entry(other).value], title=f"Differs from {other} in")


def explain_several(algorithms: Sequence[str], changes: Sequence[str]) -> None:
    """Print several algorithms side by side: their formulas, then only their differences."""
    values = []
    for name in dict.fromkeys(algorithms):
        published, value = _override(name, changes)
        values.append(value)
        console.print(f"[bold]{name}[/bold]  {escape(published.title)}")
        _print_formula(published)
        console.print()
    _print_differences(values, title="Where they differ")
    console.print("\n[bold]Beware[/bold]")
    _print_list([f"{value.name}: {caution}" for value in values for caution in cautions(value)])


def inputs(value: Algorithm) -> list[str]:
    """The arguments of `legato.loss` that the algorithm reads."""
    needed = [signal for signals in value.objective.needs().values() for signal in signals]
    groups = ["group"] if value.objective.needs_groups(value.aggregate) else []
    turn = ["turn"] if value.objective.ratio.level == "turn" else []
    state = ["state"] if value.initial() else []
    return list(dict.fromkeys(["logprobs", "advantages", "mask", *needed, *groups, *turn, *state]))


def _grid(*headers: str) -> Table:
    table = Table(*headers, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.overflow = "fold"
    return table


def _override(name: str, changes: Sequence[str]) -> tuple[Entry, Algorithm]:
    published = entry(name)
    return published, algorithm(name, dict(_parse(change) for change in changes))


def _parse(change: str) -> tuple[str, Any]:
    """Parse `path=value` like the words of a run."""
    return read_word(change, "--set")


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
        table.add_row(f"[bold]algorithm.{slot}[/bold]", f"[bold]{part.name}[/bold]", escape(first_paragraph(part)))
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            table.add_row(
                f"    {field.name}", _format_value(getattr(part, field.name)), escape(field.metadata.get("says", ""))
            )
    for path, setting in value.settings.items():
        table.add_row(f"[bold]settings.{path}[/bold]", str(setting), "read by runs; ignored in a loop of your own")
    return table


def _print_part(part: type[Part], reference: str) -> None:
    console.print(f"[bold]{part.name}[/bold]  stands in {SLOTS[part.kind]}" + escape(_file_and_hash(part, reference)))
    console.print(f"{escape(' '.join((part.__doc__ or '').split()))}\n")
    table = _grid("field", "default", "allowed", "")
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        # A user's own class may declare plain dataclass fields, without a rule and a sentence.
        allowed = field.metadata["rule"].expected if "rule" in field.metadata else "anything"
        table.add_row(field.name, _format_value(field.default), allowed, escape(field.metadata.get("says", "")))
    if table.row_count:
        console.print(table)
    changes = ", ".join(f'"{path}": {value!r}' for path, value in suggestion(part, reference).items())
    console.print(f'\nlegato.algorithm("gspo", {{{changes}}})', markup=False, soft_wrap=True)


def _file_and_hash(part: type[Part], reference: str) -> str:
    """The file of a user's own part, with its hash; empty for our parts."""
    code = code_at("part", reference) if is_import_path(reference) else None
    return "" if code is None else f"; {code.file}, SHA-256 {code.sha256[:12]}"


def suggestion(part: type[Part], reference: str) -> dict[str, Any]:
    """The fewest changes of gspo that put a part into its slot and set one of its fields."""
    slot = SLOTS[part.kind]
    single = slot in ONE
    path = slot if single else f"{slot}.{part.name}"
    first = next((each for each in dataclasses.fields(part) if each.default is not None), None)  # type: ignore[arg-type]
    field = {} if first is None else {f"{path}.{first.name}": first.default}
    alone: dict[str, Any] = {slot: reference if single else [reference], **field}
    beside = {**field} if field and not single and not is_import_path(reference) else alone
    # Try it beside the parts of gspo, in their place, without a trust region, and with the ratio that some parts need.
    for changes in (beside, alone, {"objective.trust": [], **alone}, {"objective.ratio": "geometric-weight", **alone}):
        with contextlib.suppress(InputError):
            value = algorithm("gspo", changes)
            if any(type(held) is part for _, held in parts_of(value)):
                return changes
    return alone


def first_paragraph(part: Part | type[Part]) -> str:
    """The first paragraph of a part's docstring, on one line."""
    return " ".join((part.__doc__ or "").split("\n\n")[0].split())


def _print_formula(published: Entry) -> None:
    for line in published.formula.splitlines():
        console.print(f"    {escape(line)}", soft_wrap=True)


def _print_list(sentences: Iterable[str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for sentence in dict.fromkeys(sentences):
        table.add_row("  -", escape(sentence))
    console.print(table)


def _print_deviations(published: Algorithm, value: Algorithm) -> None:
    changed = differences(published, value)
    if changed:
        console.print("\n[bold]Deviates from the named algorithm[/bold]")
        for path, (before, after) in changed.items():
            console.print(f"  algorithm.{path}: {_side(before)} -> {_side(after)}")


def _side(value: Any) -> str:
    return "absent" if value is None else escape(_format_value(value))


def _print_differences(values: Sequence[Algorithm], title: str) -> None:
    flat = [flatten(value) for value in values]
    paths = dict.fromkeys(path for each in flat for path in each)
    table = _grid("", *(value.name for value in values))
    for path in paths:
        cells = [_format_value(each[path]) if path in each else "-" for each in flat]
        if len(set(cells)) > 1:
            table.add_row(path if path.startswith("settings.") else f"algorithm.{path}", *map(escape, cells))
    console.print(f"\n[bold]{title}[/bold]" + ("" if table.row_count else " nothing"))
    if table.row_count:
        console.print(table)


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def ratio_words(value: Algorithm) -> str:
    """The ratio in a few words, for tables."""
    ratio = value.objective.ratio
    words = {"none": "none", "product": "product", "product-weight": "product, detached", "group-expectation": "group"}
    if ratio.name in words:
        return words[ratio.name]
    suffix = {"through": "", "carrier": ", gradient by token", "weight": ", detached"}[ratio.gradient]
    return f"{ratio.level}{suffix}"


_TRUST_WORDS = {"kernel": "smooth damping"}
"""What a table says in place of the name of a part that does not explain itself."""


def trust_words(value: Algorithm) -> str:
    """The trust region in a few words, for tables."""
    described = []
    for part in value.objective.trust:
        bounds = part.bounds(None)
        fields = part.in_tables or (bounds.fields if bounds is not None else ())
        numbers = "/".join(f"{each:g}" for field in fields if isinstance(each := getattr(part, field), float))
        described.append(f"{_TRUST_WORDS.get(part.name, part.name)} {numbers}".strip())
    return ", ".join(described) or "none"
