"""Parts: frozen dataclasses that are registered under a kind and a name and check their fields when constructed.

    @part("trust", "clip")
    class Clip(Trust):
        low: float = number(default=0.2, says="Distance of the lower bound from 1.", minimum=0.0)

    Clip(low=-1)                           ->  InputError: trust 'clip'.low: expected a number >= 0, got -1
    lookup("trust", "clip")                ->  Clip
    lookup("trust", "my_clip.py:MyClip")   ->  the class MyClip of that file; `module:MyClip` works as well
    lookup("trust", "clp")                 ->  InputError: unknown trust 'clp'; did you mean 'clip'? Known: clip, ...

One registry holds everything that a configuration names: parts of an algorithm, algorithms, tasks and rewards.
The declaration is also the documentation: `legato explain` prints each field with its value and its sentence.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, dataclass_transform

from legato.core.fields import check_fields, choice, flag, integer, mapping, number, numbers, pattern, text
from legato.core.importing import OwnCode, import_object, is_import_path, own_code, reference_to, source_file
from legato.core.slots import unknown_part
from legato.errors import InputError
from legato.errors import nearest as nearest

__all__ = [
    "Part",
    "check_order",
    "choice",
    "flag",
    "integer",
    "lookup",
    "mapping",
    "names",
    "nearest",
    "number",
    "numbers",
    "part",
    "pattern",
    "text",
]
"""A part is declared with this module alone: the fields come from `core/fields.py`."""

_REGISTRY: dict[str, dict[str, Any]] = {}


class Part:
    """Base of all parts. The base class of a slot sets `kind`; the `part` decorator sets `name`."""

    __slots__ = ()
    kind: ClassVar[str]
    name: ClassVar[str]
    of_user: ClassVar[bool] = True
    """Whether the class is the user's and none of Legato's; what its methods return is then checked."""


_P = TypeVar("_P", bound=type[Part])


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(number, integer, choice, flag, numbers, pattern, text, mapping),
)
def part(kind: str, name: str) -> Callable[[_P], _P]:
    """Declare a part: make it a frozen, keyword-only dataclass, check its fields, register it."""

    def decorate(cls: _P) -> _P:
        declared: _P = register(kind, name, _declare_part(cls, kind, name))
        return declared

    return decorate


def _declare_part(cls: Any, kind: str, name: str) -> Any:
    expected = getattr(cls, "kind", kind)
    if expected != kind:
        raise InputError(f"expected @part({expected!r}, ...) for {_home(cls)}, whose base class says so, got {kind!r}")
    check_of_class = getattr(cls, "__post_init__", None)

    def check(self: Any) -> None:
        check_fields(self, f"{self.kind} '{self.name}'")
        if check_of_class is not None:
            check_of_class(self)

    cls.__post_init__ = check
    # Slots create a second class, in whose methods super() fails. Our parts do not call it; a user's may.
    declared: Any = dataclasses.dataclass(frozen=True, slots=_is_ours(cls), kw_only=True)(cls)
    declared.kind, declared.name, declared.of_user = kind, name, not _is_ours(cls)
    return declared


_T = TypeVar("_T")


def register(kind: str, name: str, thing: _T, *, home: Any = None) -> _T:
    """Register anything under a kind and a name, and return it. `home`: the class or function that it comes from.

    A name of Legato's own cannot be registered again. Of several user classes with one name the last one wins, as when a
    notebook cell runs twice; import paths still find each of them.
    """
    home = thing if home is None else home
    first = _HOMES.get((kind, name), home)
    if _is_ours(first) and _home(first) != _home(home):
        second = f"a second {name!r} ({_home(home)}; the first is {_home(first)})"
        raise InputError(f"expected a {kind} with a name of its own, got {second}; rename it")
    _HOMES[kind, name] = home
    _REGISTRY.setdefault(kind, {})[name] = thing
    return thing


_HOMES: dict[tuple[str, str], Any] = {}


def _home(thing: Any) -> str:
    """Where a class or function is defined: "file:qualified name"."""
    module = sys.modules.get(thing.__module__)
    return f"{source_file(module) or thing.__module__}:{thing.__qualname__}"


def _is_ours(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] == "legato"


def check_order(part: Any, low: str, high: str) -> None:
    """Raise InputError if the field `low` of a part is above its field `high`."""
    if getattr(part, low) > getattr(part, high):
        values = f"{low} = {getattr(part, low):g} is above {high} = {getattr(part, high):g}"
        raise InputError(f"{part.kind} '{part.name}': {values}")


def names(kind: str) -> list[str]:
    """The registered names of a kind, sorted."""
    return sorted(_REGISTRY.get(kind, {}))


def registry_of(kind: str) -> Mapping[str, Any]:
    """Everything registered under a kind, by name, in the order of registration."""
    return _REGISTRY.get(kind, {})


def find(kind: str, reference: str) -> Any:
    """The object that a reference names: a registered name, or "file.py:Name" or "module:Name".

    For kinds that are not parts, such as engines. The object is returned as it is, without a check of its type.
    """
    if is_import_path(reference):
        return import_object(kind, reference)
    known = registry_of(kind)
    if reference not in known:
        raise unknown_part(kind, reference, list(known))
    return known[reference]


def lookup(kind: str, reference: str) -> type[Part]:
    """The part class that a reference names: a registered name, or the "file.py:Name" or "module:Name" of a user's class."""
    cls: type[Part] = part_at(reference) if is_import_path(reference) else find(kind, reference)
    if cls.kind != kind:
        raise InputError(f"expected a {kind}, got the {cls.kind} {cls.name!r} ({reference})")
    return cls


def part_at(path: str) -> type[Part]:
    """The part class at an import path, whatever its kind."""
    cls = import_object("part", path)
    if not isinstance(cls, type) or not issubclass(cls, Part) or not hasattr(cls, "kind"):
        raise InputError(
            f"expected a class derived from a slot (Ratio, Trust, Correction, Penalty, Aggregate, Estimator, Filter), got"
            f" {cls!r} ({path})"
        )
    if "name" not in cls.__dict__:
        _declare_plain(cls, path)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"expected a default for every field, got none for {field.name!r} ({path}); give it one")
    return cls


def _declare_plain(cls: Any, path: str) -> None:
    """Declare a class without `@part` under its own name, MyClip as "my-clip". Only its path finds it."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()
    if name in registry_of(cls.kind) and _is_ours(_HOMES[cls.kind, name]):
        raise InputError(
            f"expected a {cls.kind} with a name of its own, got a second {name!r} ({path}); rename the class, or name it"
            f' with @part("{cls.kind}", "...")'
        )
    if "__dataclass_fields__" not in cls.__dict__:
        _declare_part(cls, cls.kind, name)
    elif not cls.__dataclass_params__.frozen:
        raise InputError(f"expected a frozen dataclass, got one that can change ({path}); add frozen=True")
    cls.name = name


def reference_of(part: Part) -> str:
    """The name of a part in a configuration: its own name if it is one of Legato's, else the import path of its class."""
    cls = type(part)
    return part.name if _is_ours(cls) else reference_to(cls)


def code_of(part: Part) -> OwnCode | None:
    """The user's code that defines a part; None for a part of Legato."""
    return None if _is_ours(type(part)) else own_code(type(part))
