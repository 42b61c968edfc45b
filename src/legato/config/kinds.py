"""Looks up tasks, rewards and environments by name, lists their options and constructs them."""

import dataclasses
import functools
import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from legato.core.fields import Rule
from legato.core.importing import is_import_path, make_imported
from legato.core.parts import Part, lookup, names, nearest
from legato.errors import InputError

FAMILIES = {"task": ("task", "data"), "reward": ("reward",), "environment": ("environment",)}
"""The kinds of parts that `task.kind`, `reward.kind` and `task.environment` may name."""


@functools.cache
def register_all() -> None:
    """Import all modules of tasks and rewards, which registers their parts."""
    for room in ("tasks", "rewards"):
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
    known = [name for registry in FAMILIES[family] for name in names(registry)]
    own = '"module:name" or "file.py:name" of your own'
    if not known:
        raise InputError(f"unknown {family} {kind!r}; none is registered, give {own}")
    raise InputError(f"unknown {family} {kind!r}; {nearest(kind, known)}, or {own}")


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


def refused_options(part: type[Part], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(option, what is allowed) for each option with a value that is not allowed."""
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        rule: Rule | None = field.metadata.get("rule")
        if rule is not None and field.name in options and not rule.takes(_from_toml(part, field.name, options[field.name])):
            yield field.name, f"{rule.allowed} or absent" if rule.optional else rule.allowed


def option_names(part: type[Part]) -> list[str]:
    """The names of a part's options."""
    return [field.name for field in dataclasses.fields(part) if field.init]  # type: ignore[arg-type]


def to_toml(value: Any) -> Any:
    """The value of a part's field as TOML would store it."""
    if isinstance(value, Mapping):
        return {key: to_toml(inner) for key, inner in value.items()}
    return [to_toml(inner) for inner in value] if isinstance(value, list | tuple) else value


def _construct(part: type[Part], options: Mapping[str, Any]) -> Part:
    needed = [
        field.name
        for field in dataclasses.fields(part)  # type: ignore[arg-type]
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for name in needed:
        if name not in options:
            raise InputError(f"expected the option {name!r} of {part.kind} '{part.name}', got nothing; set it")
    try:
        return part(**{name: _from_toml(part, name, value) for name, value in options.items()})
    # A number too large for a float, a regular expression too large for its compiler, a file that is not there.
    except (TypeError, OverflowError, RecursionError, OSError) as error:
        raise InputError(f"{part.kind} '{part.name}': {error}") from None


def _from_toml(part: type[Part], name: str, value: Any) -> Any:
    """A TOML value as the part expects it: lists become tuples, `false` becomes None if the option does not allow false."""
    field = next((field for field in dataclasses.fields(part) if field.name == name), None)  # type: ignore[arg-type]
    rule = field.metadata.get("rule") if field is not None else None
    if value is False and rule is not None and not rule.accepts(False) and rule.optional:
        return None
    return tuple(value) if isinstance(value, list) else value
