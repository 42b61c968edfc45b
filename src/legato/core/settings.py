"""Settings: frozen dataclasses that declare each option of a run once, beside the code that uses it.

    @settings()
    class Sampling:
        temperature: float = number(default=1.0, says="The temperature of sampling and of all log-probs.", above=0.0)

A section of the configuration inherits the settings it holds (`config/schema.py`: `class Rollouts(Sampling, ...)`), so that
`config.rollouts` is itself a Sampling and nothing is copied. docs/configuration.md, the checks of values and what a resumed
run may change are read from the same declarations.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast, dataclass_transform

from legato.core import fields
from legato.core.fields import Rule, check_fields, declare

_C = TypeVar("_C", bound=type)
_S = TypeVar("_S")


@dataclasses.dataclass(frozen=True, slots=True)
class Table(Rule):
    """The rule of a field that holds settings of its own, or several by name."""

    section: Any = None
    """The class of the settings; None: names and values are the writer's choice."""
    several: bool = False


# Type checkers see that a field may be left out only where `default` or `default_factory` stands in its declaration.


def table(*, default_factory: type, says: str, resume: str | None = None) -> Any:
    """A table of settings; options that are not set have their defaults."""
    section = default_factory
    rule = Table("a table", lambda value: isinstance(value, section), section=section)
    return dataclasses.field(default_factory=section, metadata={"says": says, "rule": rule, "resume": resume})


def needed_table(section: type, *, allowed: str, says: str, resume: str | None = None) -> Any:
    """A table of settings that must be given; `allowed` says what may stand in its place."""
    rule = Table(allowed, lambda value: isinstance(value, section), section=section)
    return declare(dataclasses.MISSING, says, rule, resume)


def optional_table(section: type, *, default: None, says: str, resume: str | None = None) -> Any:
    """A table of settings that may be absent."""
    rule = Table("a table", lambda value: isinstance(value, section), optional=True, section=section)
    return declare(default, says, rule, resume)


def tables(section: type, *, default_factory: Callable[[], dict[str, Any]], says: str, resume: str | None = None) -> Any:
    """Settings by names of the writer's choice."""

    def accepts(value: Any) -> bool:
        return isinstance(value, Mapping) and all(isinstance(each, section) for each in value.values())

    rule = Table("a table of tables", accepts, section=section, several=True)
    return dataclasses.field(default_factory=default_factory, metadata={"says": says, "rule": rule, "resume": resume})


def free_table(*, default_factory: Callable[[], dict[str, Any]], says: str, resume: str | None = None) -> Any:
    """A table whose names and values are the writer's choice."""
    rule = Table("a table", lambda value: isinstance(value, Mapping))
    return dataclasses.field(default_factory=default_factory, metadata={"says": says, "rule": rule, "resume": resume})


def narrow(
    base: type, name: str, *, minimum: float | None = None, above: float | None = None, maximum: float | None = None
) -> Any:
    """The number field `name` of other settings, with bounds of its own."""
    field = cast(Any, base).__dataclass_fields__[name]
    says, resume = field.metadata["says"], field.metadata["resume"]
    return fields.number(default=field.default, says=says, resume=resume, minimum=minimum, above=above, maximum=maximum)


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(
        fields.number,
        fields.pair,
        fields.integer,
        fields.choice,
        fields.flag,
        fields.flag_or,
        fields.text,
        fields.texts,
        table,
        needed_table,
        optional_table,
        tables,
        free_table,
        narrow,
    ),
)
def settings(resume: str = "flag") -> Callable[[_C], _C]:
    """Declare settings: a frozen, keyword-only dataclass that checks its fields, then `check` of each class it is made of.

    `resume` is for the fields that do not say it themselves. No slots: a section inherits from several settings.
    """

    def decorate(cls: _C) -> _C:
        for declared in vars(cls).values():
            if isinstance(declared, dataclasses.Field) and declared.metadata.get("resume", "") is None:
                declared.metadata = MappingProxyType({**declared.metadata, "resume": resume})
        cast(Any, cls).__post_init__ = _check
        declared_class: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        declared_class.__dataclass_fields__ = _in_reading_order(declared_class)
        return cast(_C, declared_class)

    return decorate


def _check(self: Any) -> None:
    check_fields(self, type(self).__name__)
    for base in type(self).__mro__:
        own = vars(base).get("check")
        if own is not None:
            own(self)


def _in_reading_order(cls: Any) -> dict[str, Any]:
    """The fields of a class itself first, then those of its bases from left to right (the reverse of dataclasses)."""
    inherited = [name for base in cls.__bases__ for name in getattr(base, "__dataclass_fields__", ())]
    own = [name for name in cls.__dataclass_fields__ if name not in inherited]
    return {name: cls.__dataclass_fields__[name] for name in dict.fromkeys([*own, *inherited])}


def select(kind: type[_S], sections: Iterable[Any], **more: Any) -> _S:
    """Construct a `kind` from the settings that sections share with it; `more` are its fields that are not settings.

    >>> select(Sampling, [config.rollouts])          # doctest: +SKIP
    """
    values = dict(more)
    for field in dataclasses.fields(cast(Any, kind)):
        if field.name not in values and "rule" in field.metadata:
            values[field.name] = getattr(_holder(kind, field.name, sections), field.name)
    return kind(**values)


def _holder(kind: type, name: str, sections: Iterable[Any]) -> Any:
    declaring = tuple(base for base in kind.__mro__ if name in getattr(base, "__dataclass_fields__", ()))
    for section in sections:
        if isinstance(section, declaring):
            return section
    raise TypeError(f"no section holds {kind.__name__}.{name}")
