"""What a part is: a frozen dataclass, registered under its kind and name, whose fields are checked when it is made.

    @part("trust", "clip")
    class Clip(Trust):
        low: float = number(default=0.2, says="Distance of the lower bound from 1.", minimum=0.0)

    Clip(low=-1)           ->  ValueError: trust 'clip': low = -1 is not allowed; a number >= 0 is
    lookup("trust", "clp") ->  ValueError: unknown trust 'clp'; did you mean 'clip'? Known: clip, dual-clip, ...

The declaration is also the documentation: `legato explain` prints each field with its value and its sentence.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar, dataclass_transform

from legato.errors import InputError

_REGISTRY: dict[str, dict[str, type["Part"]]] = {}


class Part:
    """Base of all parts. `kind` and `name` are set by the `part` decorator."""

    __slots__ = ()
    kind: ClassVar[str]
    name: ClassVar[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What a field accepts: `accepts(value)` decides, `allowed` says it in words, `keep` makes it what is stored."""

    allowed: str
    accepts: Callable[[Any], bool]
    keep: Callable[[Any], Any] = lambda value: value


def _declare(default: Any, says: str, rule: Rule) -> Any:
    return dataclasses.field(default=default, metadata={"says": says, "rule": rule})


def _is_number(value: Any) -> bool:
    # bool is an int to Python; a width of True is a mistake to a person. numpy's numbers are numbers.
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def number(
    *,
    default: float | None,
    says: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    optional: bool = False,
) -> Any:
    """A finite real within the bounds (`minimum`/`maximum` inclusive, `above`/`below` exclusive); None if `optional`."""
    limits = [
        f"{sign} {bound:g}"
        for sign, bound in ((">=", minimum), (">", above), ("<=", maximum), ("<", below))
        if bound is not None
    ]
    words = "a number" if infinite else "a finite number"
    allowed = " ".join(filter(None, [words, " and ".join(limits), "or None" if optional else ""]))

    def accepts(value: Any) -> bool:
        if value is None:
            return optional
        return (
            _is_number(value)
            and (infinite or math.isfinite(value))
            and (minimum is None or value >= minimum)
            and (above is None or value > above)
            and (maximum is None or value <= maximum)
            and (below is None or value < below)
        )

    # 20 and 20.0 are one value: they print alike and compare alike in a stored run.
    return _declare(default, says, Rule(allowed, accepts, lambda value: None if value is None else float(value)))


def integer(*, default: int, says: str, minimum: int, maximum: int | None = None) -> Any:
    """A whole number of at least `minimum`, at most `maximum`."""

    def accepts(value: Any) -> bool:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and value >= minimum and (maximum is None or value <= maximum)

    allowed = f"a whole number >= {minimum}" + ("" if maximum is None else f" and <= {maximum}")
    return _declare(default, says, Rule(allowed, accepts, int))


def choice(*allowed: str, default: str, says: str) -> Any:
    """One of the given words."""
    return _declare(default, says, Rule("one of " + ", ".join(map(repr, allowed)), lambda value: value in allowed))


def flag(*, default: bool, says: str) -> Any:
    """True or False."""
    return _declare(default, says, Rule("True or False", lambda value: isinstance(value, bool)))


def pattern(*, default: str, says: str) -> Any:
    """A regular expression that compiles."""

    def accepts(value: Any) -> bool:
        try:
            re.compile(value)
        except (re.error, TypeError):
            return False
        return True

    return _declare(default, says, Rule("a regular expression", accepts))


def text(*, default: Any = dataclasses.MISSING, says: str, optional: bool = False) -> Any:
    """A text that is not blank; None if `optional`; without a default it must be given."""

    def accepts(value: Any) -> bool:
        return optional if value is None else isinstance(value, str) and bool(value.strip())

    return _declare(default, says, Rule("a text that is not empty" + (" or None" if optional else ""), accepts))


def mapping(*, default: tuple[tuple[str, Any], ...] = (), says: str) -> Any:
    """Names with plain values (text, numbers, flags, None, and lists of these), kept as sorted pairs so that it hashes."""

    def accepts(value: Any) -> bool:
        try:
            return all(isinstance(name, str) and _is_plain(held) for name, held in dict(value).items())
        except (TypeError, ValueError, RecursionError):
            return False

    def keep(value: Any) -> tuple[tuple[str, Any], ...]:
        return tuple((name, _frozen(held)) for name, held in sorted(dict(value).items(), key=lambda pair: pair[0]))

    return _declare(default, says, Rule("a mapping of names to text, numbers, flags, None or lists of these", accepts, keep))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def numbers(*, default: tuple[float, ...] | None, says: str) -> Any:
    """A tuple of finite numbers, or None."""

    def accepts(value: Any) -> bool:
        return value is None or (isinstance(value, tuple) and all(_is_number(x) and math.isfinite(x) for x in value))

    return _declare(default, says, Rule("a tuple of finite numbers or None", accepts))


def _check_fields(self: Any) -> None:
    for field in dataclasses.fields(self):
        rule: Rule | None = field.metadata.get("rule")
        value = getattr(self, field.name)
        if rule is None:
            continue
        if not rule.accepts(value):
            raise InputError(f"{self.kind} '{self.name}': {field.name} = {value!r} is not allowed; {rule.allowed} is")
        object.__setattr__(self, field.name, rule.keep(value))


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
            _check_fields(self)
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
