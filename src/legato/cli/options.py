"""Prints options, kinds of tasks, rewards and engines from the stored table (`config/names.py`). Loads no torch."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from legato.config.names import ALGORITHMS, KINDS, SECTIONS
from legato.config.sections import FAMILIES, FREE, allowed_values
from legato.core.fields import rule_of_form
from legato.core.slots import ONE, SEVERAL

MAIN = (
    "algorithm.name",
    "task.kind",
    "reward.kind",
    "policy.model",
    "policy.lora",
    "policy.max_prompt_tokens",
    "rollouts.samples_per_prompt",
    "rollouts.max_response_tokens",
    "rollouts.temperature",
    "training.steps",
    "training.prompts_per_step",
    "training.updates_per_step",
    "training.lr",
    "training.seed",
    "evaluation.every_steps",
    "evaluation.target",
    "health.action",
    "output.directory",
    "output.name",
    "output.checkpoint_every_steps",
    "output.log_every_seconds",
)
"""The options that `legato train --help` lists."""

_TABLES = {"task": "task", "data": "task", "reward": "reward", "environment": "task", "engine": "rollouts"}
"""Kind of a part -> the table of a recipe that names it."""


def print_main_options(console: Console | None = None) -> None:
    """Print the main options with a sentence each, and where the others are explained."""
    console = console or Console(highlight=False)
    table = _grid("option", "default", "")
    for path in MAIN:
        section, _, name = path.rpartition(".")
        option = SECTIONS[section][name]
        table.add_row(path, Text(_bare(option["default"])), Text(first_sentence(option["says"])))
    console.print(table)
    console.print(
        Text(
            "\nlegato explain training.lr explains an option; legato explain gspo an algorithm; legato explain jsonl a task,"
            " a reward or an engine. All options: docs/configuration.md"
        )
    )


def explain_stored(name: str) -> bool:
    """Explain an option, a table, a slot of an algorithm, or a task, reward or engine; False if nothing has that name."""
    console = Console(highlight=False)
    printed = False
    for kind, part in kinds_named(name):
        _print_kind(console, kind, name, part)
        printed = True
    if printed or is_algorithm_or_part(name):
        return printed
    paths = option_paths(name)
    for path in paths:
        _print_path(console, path)
    return bool(paths) or _print_slot(console, canonical_path(name))


def is_algorithm_or_part(name: str) -> bool:
    """Whether an algorithm, or a part of one, has that name."""
    return name in ALGORITHMS or any(name in KINDS[kind] for kind in (*ONE.values(), *SEVERAL.values()))


def kinds_named(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(kind of part, what is stored of it) for tasks, rewards, environments and engines of that name."""
    for kind in _TABLES:
        if name in KINDS[kind]:
            yield kind, KINDS[kind][name]


def option_paths(name: str) -> list[str]:
    """The paths that a name means: itself, or every option with that last word."""
    path = canonical_path(name)
    if path in SECTIONS or _option_at(path) is not None:
        return [path] if path else []
    if "." in name:
        return []
    return [f"{table}.{name}" for table, options in SECTIONS.items() if table and name in options and name not in FREE]


def canonical_path(path: str) -> str:
    """The spelling of a path that is shown: algorithm.objective... for a slot of the algorithm; NAME for a component."""
    if path.partition(".")[0] in {slot.partition(".")[0] for slot in (*ONE, *SEVERAL)}:
        path = f"algorithm.{path}"
    return re.sub(r"^reward\.components\.[^.]+", "reward.components.NAME", path)


def all_paths() -> list[str]:
    """Every option that can be typed: with the fields of parts in the slots that hold several."""
    paths = [f"{table}.{name}" for table, options in SECTIONS.items() for name in options if table and name not in FREE]
    paths += [f"algorithm.{slot}" for slot in (*ONE, *SEVERAL)]
    for slot, kind in SEVERAL.items():
        paths += [f"algorithm.{slot}.{part}.{field}" for part, each in KINDS[kind].items() for field in each["fields"]]
    for slot, kind in ONE.items():
        fields = dict.fromkeys(field for each in KINDS[kind].values() for field in each["fields"])
        paths += [f"algorithm.{slot}.{field}" for field in fields]
    return [path for path in paths if "NAME" not in path]


def known_names() -> list[str]:
    """Everything that `legato explain` explains, except single options."""
    kinds = [name for parts in KINDS.values() for name in parts]
    return list(dict.fromkeys([*ALGORITHMS, *kinds, *(table for table in SECTIONS if table and "NAME" not in table)]))


def choices_of(path: str) -> list[str]:
    """The values of an option that are a list of words; empty for numbers and free text."""
    if path in ("algorithm", "algorithm.name"):
        return list(ALGORITHMS)
    if path in ("task.kind", "reward.kind", "task.second.kind"):
        return [name for registry in FAMILIES[path.partition(".")[0]] for name in KINDS[registry]]
    if path == "rollouts.engine":
        return list(KINDS["engine"])
    inner = path.removeprefix("algorithm.")
    if inner in ONE:
        return list(KINDS[ONE[inner]])
    option = _option_at(path)
    if option is None or "rule" not in option:
        return []
    name, words, _ = option["rule"]
    return [*words, *(("true", "false") if name in ("flag", "flag_or") else ())] if name != "text" else []


def _option_at(path: str) -> Mapping[str, Any] | None:
    table, _, name = path.rpartition(".")
    if table in SECTIONS and name in SECTIONS[table] and name not in FREE:
        return SECTIONS[table][name]
    for slot, kind in SEVERAL.items():
        part, _, field = path.removeprefix(f"algorithm.{slot}.").partition(".")
        if path.startswith(f"algorithm.{slot}.") and field in KINDS[kind].get(part, {"fields": {}})["fields"]:
            stored: Mapping[str, Any] = KINDS[kind][part]["fields"][field]
            return stored
    return None


def _print_path(console: Console, path: str) -> None:
    option = _option_at(path)
    if option is not None:
        console.print(
            Text.assemble((path, "bold"), f"  {_allowed_text(option)}; default {_bare(option['default'])}"), soft_wrap=True
        )
        console.print(Text(f"  {option['says']}"))
        resumed = {
            "free": "may change it",
            "flag": "may change it with --allow-changes",
            "refused": "must keep it",
        }.get(option.get("resume", ""))
        if resumed is not None and "table" not in option:
            console.print(Text(f"  legato train recipe.toml {path}=VALUE; a resumed run {resumed}", style="dim"))
    if path in SECTIONS:
        _print_fields(console, {name: each for name, each in SECTIONS[path].items() if name not in FREE})


def _print_slot(console: Console, path: str) -> bool:
    """Explain a slot of an algorithm, or a field of the parts that fit into a slot of one; False if the path is neither."""
    inner = path.removeprefix("algorithm.")
    slots = {**ONE, **SEVERAL}
    if inner in slots:
        parts, form = KINDS[slots[inner]], "one of these" if inner in ONE else "a list of these"
        console.print(Text.assemble((path, "bold"), f"  {form}, or file.py:Name of your own\n"))
        table = _grid("part", "")
        for name, part in parts.items():
            table.add_row(name, Text(first_sentence(part["says"])))
        console.print(table)
        console.print(Text(f"\nlegato explain {next(iter(parts))} explains one of them", style="dim"))
        return True
    slot, _, field = inner.rpartition(".")
    holders = {name: part for name, part in KINDS[ONE[slot]].items() if field in part["fields"]} if slot in ONE else {}
    for name, part in holders.items():
        console.print(Text.assemble((path, "bold"), f"  with {slot} = {name}"))
        _print_fields(console, {field: part["fields"][field]})
    return bool(holders)


def _print_kind(console: Console, kind: str, name: str, part: Mapping[str, Any]) -> None:
    table = _TABLES[kind]
    key = {"environment": "environment", "engine": "engine"}.get(kind, "kind")
    console.print(Text.assemble((name, "bold"), f"  is set as {table}.{key}"))
    console.print(Text(f"{part['says']}\n"))
    # An option that the table has itself is explained with the table.
    fields = {field: each for field, each in part["fields"].items() if field not in SECTIONS[table]}
    _print_fields(console, fields)
    needed = [field for field, each in fields.items() if each["needed"]]
    lines = [f"[{table}]", f'{key} = "{name}"', *(f'{field} = "..."' for field in needed)]
    console.print(Text("\n".join(["", *lines])))
    if kind == "data":
        console.print(
            Text(
                "\nA reward sees every other column as rollout.problem.fields[NAME]; the table [task] also holds held_out,"
                " system_prompt and more: legato explain task",
                style="dim",
            )
        )


def _print_fields(console: Console, fields: Mapping[str, Any]) -> None:
    if not fields:
        return
    table = _grid("option", "default", "allowed", "")
    for name, option in fields.items():
        table.add_row(name, Text(_bare(option["default"])), Text(_allowed_text(option)), Text(option["says"]))
    console.print(table)


def _allowed_text(option: Mapping[str, Any]) -> str:
    if "table" in option:
        return f"{option['allowed']} or absent" if option["optional"] else str(option["allowed"])
    return allowed_values(rule_of_form(option["rule"]))


def first_sentence(says: str) -> str:
    """A sentence up to its first semicolon or full stop."""
    return re.split(r"(?<=[^.]);|\.(?:\s|$)", says, maxsplit=1)[0]


def _bare(default: str) -> str:
    return default.strip("`") or "-"


def _grid(*headers: str) -> Table:
    table = Table(*headers, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.overflow = "fold"
    return table
