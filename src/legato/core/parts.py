"""What a part is: a frozen dataclass, registered under its kind and name, whose fields are checked when it is made.

    @part("trust", "clip")
    class Clip(Trust):
        low: float = number(default=0.2, says="Distance of the lower bound from 1.", minimum=0.0)

    Clip(low=-1)           ->  InputError: trust 'clip'.low: expected a number >= 0, got -1
    lookup("trust", "clp") ->  InputError: unknown trust 'clp'; did you mean 'clip'? Known: clip, dual-clip, ...

The declaration is also the documentation: `legato explain` prints each field with its value and its sentence.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar, dataclass_transform

from legato.core.fields import check_fields, choice, flag, integer, mapping, number, numbers, pattern, text
from legato.errors import InputError

__all__ = [
    "Part",
    "choice",
    "flag",
    "integer",
    "lookup",
    "mapping",
    "names",
    "nearest",
    "number",
    "numbers",
    "ordered",
    "part",
    "pattern",
    "text",
]
"""A part is declared with this module alone: the fields come from `core/fields.py`."""

_REGISTRY: dict[str, dict[str, type["Part"]]] = {}


class Part:
    """Base of all parts. `kind` and `name` are set by the `part` decorator."""

    __slots__ = ()
    kind: ClassVar[str]
    name: ClassVar[str]


_P = TypeVar("_P", bound=type[Part])


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(number, integer, choice, flag, numbers, pattern, text, mapping),
)
def part(kind: str, name: str) -> Callable[[_P], _P]:
    """Declare a part: make it a frozen, slotted, keyword-only dataclass, check its fields, register it."""

    def declare(cls: _P) -> _P:
        own_check = cls.__dict__.get("__post_init__")

        def check(self: Any) -> None:
            check_fields(self, f"{self.kind} '{self.name}'")
            if own_check is not None:
                own_check(self)

        cls.__post_init__ = check  # type: ignore[attr-defined]
        declared: Any = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
        declared.kind, declared.name = kind, name
        registered = _REGISTRY.setdefault(kind, {})
        assert name not in registered, f"two parts are called {kind} '{name}'"
        registered[name] = declared
        return declared  # type: ignore[no-any-return]

    return declare


def ordered(part: Any, low: str, high: str) -> None:
    """Two fields of a part are in order."""
    if getattr(part, low) > getattr(part, high):
        values = f"{low} = {getattr(part, low):g} is above {high} = {getattr(part, high):g}"
        raise InputError(f"{part.kind} '{part.name}': {values}")


def names(kind: str) -> list[str]:
    """The registered names of a kind, sorted."""
    return sorted(_REGISTRY.get(kind, {}))


def nearest(word: str, known: Iterable[str]) -> str:
    """' did you mean ...?' when something known is close, and the list of what is known."""
    known = list(known)
    close = difflib.get_close_matches(word.lower().replace("_", "-"), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? Known: {', '.join(known)}" if close else f"known: {', '.join(known)}"


def lookup(kind: str, name: str) -> type[Part]:
    """The part class registered under this kind and name."""
    registered = _REGISTRY.get(kind, {})
    if name not in registered:
        raise InputError(f"unknown {kind} {name!r}; {nearest(name, sorted(registered))}")
    return registered[name]
