"""Looks up tasks, rewards and environments by name, lists their options and constructs them."""

import dataclasses
import functools
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from legato.config.sections import FAMILIES, Section, declared_fields, require_options, unknown_kind, value_from_toml
from legato.core.importing import is_import_path, make_imported
from legato.core.parts import Part, lookup, names
from legato.errors import InputError
from legato.tasks.data import Usual


@functools.cache
def register_all() -> None:
    """Import all modules of tasks, rewards and environments, which registers their parts."""
    for room in ("tasks", "rewards", "environments"):
        package = import_module(f"legato.{room}")
        # Worker modules run in their own process; their imports may be slow or missing here.
        for module in (each for each in pkgutil.iter_modules(package.__path__) if not each.name.endswith("_worker")):
            import_module(f"legato.{room}.{module.name}")


def find(family: str, kind: str) -> type[Part] | None:
    """The class of a named part; None for an import path, which is not imported here."""
    register_all()
    if is_import_path(kind):
        return None
    for registry in FAMILIES[family]:
        if kind in names(registry):
            return lookup(registry, kind)
    raise unknown_kind(family, kind, [name for registry in FAMILIES[family] for name in names(registry)])


def find_section(family: str, kind: str) -> Section | None:
    """The options of a named part; None for an import path."""
    part = find(family, kind)
    if part is None:
        return None
    return Section(
        fields=declared_fields(part), make=lambda **options: complete_options(part, options), usual=usual_options(part)
    )


def make(family: str, kind: str, options: Mapping[str, Any]) -> Any:
    """Construct a task, reward or environment from its kind and options. An import path is imported."""
    part = find(family, kind)
    return make_imported(family, kind, options) if part is None else _construct(part, options)


def complete_options(part: type[Part], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a part as TOML would store them, checked by constructing it. Options that are None by default may be
    missing."""
    instance = _construct(part, options)
    completed = {}
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        rule, value = field.metadata.get("rule"), getattr(instance, field.name)
        # A part stores a table as pairs, so that it is hashable.
        value = to_toml(dict(value) if rule is not None and rule.takes({}) else value)
        if value is not None or field.default is not None:
            completed[field.name] = value
    return completed


def option_names(part: type[Part]) -> list[str]:
    """The names of a part's options."""
    return [field.name for field in dataclasses.fields(part) if field.init]  # type: ignore[arg-type]


def usual_options(part: type[Part] | None) -> dict[str, Any]:
    """The options that a task has by default as an evaluation set, where they differ from those of training."""
    usual: Usual | None = getattr(part, "usual", None)
    return {} if usual is None else dict(usual.options)


def usual_evaluation(kind: str) -> Usual | None:
    """How a task is usually evaluated; None if it is no published set."""
    return getattr(find("task", kind), "usual", None)


def to_toml(value: Any) -> Any:
    """The value of a part's field as TOML would store it."""
    if isinstance(value, Mapping):
        return {key: to_toml(inner) for key, inner in value.items()}
    return [to_toml(inner) for inner in value] if isinstance(value, list | tuple) else value


def _construct(part: type[Part], options: Mapping[str, Any]) -> Part:
    fields = declared_fields(part)
    require_options(f"{part.kind} '{part.name}'", fields, options)
    try:
        rules = {name: declared.rule for name, declared in fields.items()}
        return part(**{name: value_from_toml(rules.get(name), value) for name, value in options.items()})
    # A number too large for a float, a regular expression too large for its compiler, a file that is not there.
    except (TypeError, OverflowError, RecursionError, OSError) as error:
        raise InputError(f"{part.kind} '{part.name}': {error}") from None
