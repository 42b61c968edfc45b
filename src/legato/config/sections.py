"""The options of each table as data: their names and rules, read from the declarations or from `names.py`.

The declarations stand beside the code that uses them and load torch, which takes seconds. `names.py` holds the same rules as
plain data (`make docs` writes it from the declarations), so that a mistake is refused in a moment. `validate.py` checks with
either; only the declarations make a configuration.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from legato.config.names import KINDS, SECTIONS
from legato.core.fields import Rule, rule_of_form
from legato.core.importing import is_import_path
from legato.core.settings import Table
from legato.errors import InputError, nearest

FREE = {"changes": "PATH", "options": "OPTION"}
"""Fields whose own name is not part of the path -> the placeholder that the page shows."""

FAMILIES = {"task": ("task", "data"), "reward": ("reward",), "environment": ("environment",)}
"""The kinds of parts that `task.kind`, `reward.kind` and `task.environment` may name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One option of a table, or of a part."""

    rule: Rule | None
    """None where a user's part declares a plain field."""
    needed: bool
    """Whether it has no default."""
    default: Any = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Section:
    """A table of options, or the options of a kind of task or reward."""

    fields: Mapping[str, Declared]
    make: Callable[..., Any]
    """Makes the settings of checked values; of a part, all its options as TOML would store them. InputError if they do not
    go together."""
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options that a task has by default as an evaluation set, where they differ from those of training."""

    @property
    def names(self) -> list[str]:
        """The names of the options, without the fields of `FREE`."""
        return [name for name in self.fields if name not in FREE]

    @property
    def has_options(self) -> bool:
        """Whether the table also holds the options of its kind."""
        return "kind" in self.fields and "options" in self.fields

    def rule(self, name: str) -> Rule:
        rule = self.fields[name].rule
        assert rule is not None, name
        return rule

    def table(self, name: str) -> "Section":
        """The section of an option that is a table."""
        return section_of(cast(Table, self.fields[name].rule).section)

    def refused(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """(option, what is allowed) for each option with a value that is not allowed."""
        for name, declared in self.fields.items():
            rule = declared.rule
            if rule is not None and name in options and not rule.takes(value_from_toml(rule, options[name])):
                yield name, allowed_values(rule)


Find = Callable[[str, str], Section | None]
"""From a family and a kind ("task", "jsonl") to its options; None for an import path, which is not imported."""


def section_of(declared: Any) -> Section:
    """The section of a class of settings; a section is itself."""
    return declared if isinstance(declared, Section) else _section_of_class(declared)


@functools.cache
def _section_of_class(declared: Any) -> Section:
    return Section(fields=declared_fields(declared), make=declared)


def declared_fields(declared: Any) -> dict[str, Declared]:
    """The fields of a class of settings or of a part."""
    fields = {}
    for field in dataclasses.fields(declared):
        missing = field.default is dataclasses.MISSING
        if field.init:
            fields[field.name] = Declared(
                rule=field.metadata.get("rule"),
                needed=missing and field.default_factory is dataclasses.MISSING,
                default=None if missing else field.default,
            )
    return fields


def allowed_values(rule: Rule) -> str:
    """The values that a rule allows, in words for TOML."""
    return f"{rule.allowed} or absent" if rule.optional else rule.allowed


def value_from_toml(rule: Rule | None, value: Any) -> Any:
    """A TOML value as a part expects it: lists become tuples, `false` becomes None if the option does not allow false."""
    if value is False and rule is not None and not rule.accepts(False) and rule.optional:
        return None
    return tuple(value) if isinstance(value, list) else value


def require_options(title: str, fields: Mapping[str, Declared], options: Mapping[str, Any]) -> None:
    """InputError if an option without a default is missing. `title`: the part, as in "data 'jsonl'"."""
    for name, declared in fields.items():
        if declared.needed and name not in options:
            raise InputError(f"expected the option {name!r} of {title}, got nothing; set it")


def unknown_kind(family: str, kind: str, known: list[str]) -> InputError:
    """The error about a kind of task or reward that does not exist."""
    own = '"module:name" or "file.py:name" of your own'
    if not known:
        return InputError(f"unknown {family} {kind!r}; none is registered, give {own}")
    return InputError(f"unknown {family} {kind!r}; {nearest(kind, known)}, or {own}")


# From names.py


@functools.cache
def stored_section(path: str = "") -> Section:
    """The section at a path of `names.py`. It makes nothing: the values are only checked."""
    return Section(fields={name: _read_declared(each) for name, each in SECTIONS[path].items()}, make=lambda **values: None)


def _read_declared(option: Mapping[str, Any]) -> Declared:
    rule: Rule | None
    if "table" in option:
        path = option["table"]
        section = None if path is None else stored_section(path)
        rule = Table(
            option["allowed"],
            lambda value: isinstance(value, dict),
            optional=option["optional"],
            section=section,
            several=option["several"],
        )
    else:
        rule = rule_of_form(option["rule"])
    return Declared(rule=rule, needed=option["needed"], default=option["value"])


def stored_kind(family: str, kind: str) -> Section | None:
    """Like `config.kinds.find`, from `names.py`: the options of a task or reward of ours."""
    if is_import_path(kind):
        return None
    for registry in FAMILIES[family]:
        if kind in KINDS[registry]:
            return _stored_part(registry, kind)
    raise unknown_kind(family, kind, [name for registry in FAMILIES[family] for name in sorted(KINDS[registry])])


@functools.cache
def _stored_part(registry: str, kind: str) -> Section:
    fields = {name: _read_declared(each) for name, each in KINDS[registry][kind]["fields"].items()}

    def make(**options: Any) -> dict[str, Any]:
        require_options(f"{registry} '{kind}'", fields, options)
        return options

    return Section(fields=fields, make=make, usual=KINDS[registry][kind].get("usual", {}))
