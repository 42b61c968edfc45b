"""How a field of a part or of settings is declared: its default, its limits and a sentence, in one place.

    lr: float = number(default=1e-6, says="The learning rate.", above=0.0)

Values are checked when the object is constructed (`check_fields`), and nothing is converted silently: a number in quotes is
text, and True is not 1. `resume` says what a resumed run may do with a setting; parts do not use it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ParamSpec

from legato.errors import InputError

LARGEST = 2**63 - 1
"""TOML and torch count in 64 bits."""

RESUME = ("free", "flag", "refused")
"""In a resumed run: may change, needs --allow-changes, must not change."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The values a field accepts: `accepts(value)` decides, `allowed` describes them, `keep` converts to the stored form."""

    allowed: str
    accepts: Callable[[Any], bool]
    keep: Callable[[Any], Any] = lambda value: value
    optional: bool = False
    """None is accepted too."""
    form: "Form | None" = dataclasses.field(default=None, compare=False)
    """The function of this module that made the rule, and its arguments: `rule_of_form` makes it again from plain data."""

    @property
    def expected(self) -> str:
        """The allowed values in words, as an error message from Python names them."""
        return f"{self.allowed} or None" if self.optional else self.allowed

    def takes(self, value: Any) -> bool:
        """Whether a value is allowed."""
        return self.optional if value is None else self.accepts(value)

    def to_stored(self, value: Any) -> Any:
        """An allowed value in its stored form."""
        return None if value is None else self.keep(value)


Form = tuple[str, tuple[Any, ...], dict[str, Any]]
"""(name of a function of this module, its positional arguments, its other arguments that make the rule)"""

_P = ParamSpec("_P")
_MAKERS: dict[str, Callable[..., Any]] = {}


def _remember_form(make: Callable[_P, Any]) -> Callable[_P, Any]:
    """Decorate a function that declares a field: its rule then knows how it was made."""

    @functools.wraps(make)
    def declared(*arguments: _P.args, **named: _P.kwargs) -> Any:
        field = make(*arguments, **named)
        ruling = {
            name: value
            for name, value in named.items()
            if name not in ("default", "says", "resume") and value is not None and value is not False
        }
        rule = dataclasses.replace(field.metadata["rule"], form=(make.__name__, arguments, ruling))
        field.metadata = MappingProxyType({**field.metadata, "rule": rule})
        return field

    _MAKERS[make.__name__] = declared
    return declared


def rule_of_form(form: Form) -> Rule:
    """The rule that a form describes. The default is no part of it, and stands as None here."""
    name, arguments, named = form
    rule: Rule = _MAKERS[name](*arguments, default=None, says="", **named).metadata["rule"]
    return rule


def declare(default: Any, says: str, rule: Rule, resume: str | None = None) -> Any:
    """A dataclass field with its sentence and its rule; `resume` None: the default of the class."""
    assert resume is None or resume in RESUME, resume
    return dataclasses.field(default=default, metadata={"says": says, "rule": rule, "resume": resume})


def check_fields(value: Any, where: str) -> None:
    """Check every declared field of a new object and convert it to its stored form."""
    for field in dataclasses.fields(value):
        rule: Rule | None = field.metadata.get("rule")
        if rule is None:
            continue
        content = getattr(value, field.name)
        if not rule.takes(content):
            raise InputError(f"{where}.{field.name}: expected {rule.expected}, got {content!r}")
        object.__setattr__(value, field.name, rule.to_stored(content))


def _real(
    minimum: float | None, above: float | None, maximum: float | None, below: float | None, infinite: bool = False
) -> Rule:
    limits = [
        f"{sign} {bound:g}"
        for sign, bound in ((">=", minimum), (">", above), ("<=", maximum), ("<", below))
        if bound is not None
    ]

    def accepts(value: Any) -> bool:
        # bool is an int to Python; a width of True is a mistake to a person. numpy's numbers are numbers.
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        try:
            value = float(value)
        except OverflowError:
            return False
        return (
            not math.isnan(value)
            and (infinite or math.isfinite(value))
            and (minimum is None or value >= minimum)
            and (above is None or value > above)
            and (maximum is None or value <= maximum)
            and (below is None or value < below)
        )

    words = "a number" if infinite else "a finite number"
    # 20 and 20.0 are one value: they print alike and compare alike in a stored run.
    return Rule(" ".join(filter(None, [words, " and ".join(limits)])), accepts, float)


@_remember_form
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
    resume: str | None = None,
) -> Any:
    """A finite real within the bounds (`minimum`/`maximum` inclusive, `above`/`below` exclusive); None if `optional`."""
    rule = _real(minimum, above, maximum, below, infinite)
    return declare(default, says, dataclasses.replace(rule, optional=optional), resume)


@_remember_form
def pair(
    *,
    default: tuple[float, float] | None,
    says: str,
    minimum: float | None = None,
    below: float | None = None,
    resume: Any = None,
) -> Any:
    """Two finite numbers within the bounds."""
    each = _real(minimum, None, None, below)

    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) == 2 and all(map(each.accepts, value))

    rule = Rule(f"a list of 2, each {each.allowed}", accepts, lambda value: tuple(map(each.keep, value)))
    return declare(default, says, rule, resume)


@_remember_form
def integer(
    *,
    default: int | None,
    says: str,
    minimum: int,
    maximum: int | None = None,
    optional: bool = False,
    resume: str | None = None,
) -> Any:
    """A whole number of at least `minimum`, at most `maximum` and within 64 bits; None if `optional`."""
    most = LARGEST if maximum is None else maximum

    def accepts(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and minimum <= int(value) <= most

    allowed = f"a whole number >= {minimum}" + ("" if maximum is None else f" and <= {maximum}")
    return declare(default, says, Rule(allowed, accepts, int, optional), resume)


@_remember_form
def choice(*allowed: str, default: str | None, says: str, resume: str | None = None) -> Any:
    """One of the given words."""
    return declare(default, says, Rule(_one_of(allowed), lambda value: isinstance(value, str) and value in allowed), resume)


def _one_of(words: tuple[str, ...]) -> str:
    return ("one of " if words[1:] else "") + ", ".join(f'"{word}"' for word in words)


@_remember_form
def flag(*, default: bool | None, says: str, resume: str | None = None) -> Any:
    """True or False."""
    return declare(default, says, Rule("true or false", lambda value: isinstance(value, bool)), resume)


@_remember_form
def flag_or(*words: str, default: bool | str | None, says: str, resume: str | None = None) -> Any:
    """True, False or one of the given words."""

    def accepts(value: Any) -> bool:
        return isinstance(value, bool) or (isinstance(value, str) and value in words)

    return declare(default, says, Rule(f"true or false or {_one_of(words)}", accepts), resume)


@_remember_form
def pattern(*, default: str | None, says: str) -> Any:
    """A regular expression that compiles."""

    def accepts(value: Any) -> bool:
        try:
            re.compile(value)
        # Too large a count overflows, too deep a nesting recurses.
        except (re.error, TypeError, OverflowError, RecursionError):
            return False
        return True

    return declare(default, says, Rule("a regular expression", accepts))


@_remember_form
def text(
    *,
    default: Any = dataclasses.MISSING,
    says: str,
    optional: bool = False,
    blank: bool = False,
    resume: str | None = None,
) -> Any:
    """A text that is not empty, and not `blank` either; None if `optional`; without a default it must be given."""

    def accepts(value: Any) -> bool:
        return isinstance(value, str) and bool(value if blank else value.strip())

    return declare(default, says, Rule("a text that is not empty", accepts, optional=optional), resume)


@_remember_form
def texts(*, default: tuple[str, ...] | None, says: str, resume: str | None = None) -> Any:
    """A list of texts, none of them empty."""

    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value)

    return declare(default, says, Rule("a list of texts", accepts, tuple), resume)


@_remember_form
def mapping(*, default: tuple[tuple[str, Any], ...] | None = (), says: str) -> Any:
    """Names with plain values (text, numbers, flags, None, and lists of these), kept as sorted pairs so that it hashes."""

    def accepts(value: Any) -> bool:
        try:
            return all(isinstance(name, str) and _is_plain(each) for name, each in dict(value).items())
        except (TypeError, ValueError, RecursionError):
            return False

    def keep(value: Any) -> tuple[tuple[str, Any], ...]:
        return tuple((name, _freeze(each)) for name, each in sorted(dict(value).items(), key=lambda pair: pair[0]))

    return declare(default, says, Rule("a mapping of names to text, numbers, flags, None or lists of these", accepts, keep))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _freeze(value: Any) -> Any:
    """Lists as tuples, at every depth."""
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


@_remember_form
def numbers(*, default: tuple[float, ...] | None, says: str) -> Any:
    """A tuple of finite numbers, or None."""
    each = _real(None, None, None, None)

    def accepts(value: Any) -> bool:
        return isinstance(value, tuple) and all(map(each.accepts, value))

    return declare(default, says, Rule("a tuple of finite numbers", accepts, optional=True))
