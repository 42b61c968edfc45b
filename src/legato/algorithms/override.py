"""Changing a value by dotted path: `objective.trust.clip.low`, `aggregate`, `objective.penalties.kl.beta` ...

A slot of one part takes a name or a part; a slot of several takes a list of them. A name is a registered one or the import
path of a class, "my_clip.py:MyClip". A path below a part sets a field; in a slot of several the part goes by its own name
(`objective.trust.my-clip.under`), is added if it is not there and its name is registered, and None as its value removes it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.core.parts import Part, lookup, reference_of
from legato.core.slots import ONE, SEVERAL, not_a_list, not_a_name, not_removed, split_path, unknown_field
from legato.errors import InputError


def override(algorithm: Algorithm, changes: Mapping[str, Any]) -> Algorithm:
    """The algorithm with these changes. Slots are replaced before fields inside them are set."""
    slots: dict[str, Any] = {}
    fields: dict[tuple[str, str], dict[str, Any]] = {}
    settings = dict(algorithm.settings)
    for path, value in changes.items():
        if not isinstance(path, str) or not all(path.split(".")):
            raise InputError(f"override path {path!r} is not a dotted path, as in objective.trust.clip.low")
        # A configuration writes algorithm.objective.trust.clip.low.
        slot, rest = split_path(path.removeprefix("algorithm."))
        if slot == "settings":
            settings[_require_name(path, rest)] = value
        elif not rest:
            slots[slot] = _several(slot, value) if slot in SEVERAL else build_part(ONE[slot], path, value)
        elif slot in ONE:
            fields.setdefault((slot, ""), {})[rest] = value
        else:
            name, _, field = rest.partition(".")
            fields.setdefault((slot, name), {})[field] = value
    for (slot, name), assignments in fields.items():
        current = slots.get(slot, _get(algorithm, slot))
        slots[slot] = _set_in_several(slot, name, current, assignments) if name else _set(slot, current, assignments)
    return _replace(algorithm, slots, settings)


def _require_name(path: str, rest: str) -> str:
    if not rest:
        raise InputError(f"override path {path!r} needs the name of a setting, as in settings.training.updates_per_step")
    return rest


def _get(algorithm: Algorithm, slot: str) -> Any:
    value: Any = algorithm
    for word in slot.split("."):
        value = getattr(value, word)
    return value


def build_part(kind: str, path: str, value: Any) -> Part:
    """The part for a slot, from a part itself, a name or an import path."""
    if isinstance(value, Part):
        if value.kind != kind:
            raise InputError(f"{path} holds a {kind}; {value.name!r} is a {value.kind}")
        return value
    if not isinstance(value, str):
        raise not_a_name(path, kind, value)
    return lookup(kind, value)()


def _several(slot: str, value: Any) -> tuple[Part, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise not_a_list(slot, value)
    return tuple(build_part(SEVERAL[slot], slot, item) for item in value)


def _set(path: str, part: Part, assignments: Mapping[str, Any]) -> Part:
    known = [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]
    for field in assignments:
        if field not in known:
            raise unknown_field(path, part.kind, part.name, field, known)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in assignments.items()}
    try:
        return dataclasses.replace(part, **values)  # type: ignore[type-var]
    except ValueError as error:
        raise InputError(f"override of {path}: {error}") from None


def _set_in_several(slot: str, name: str, parts: tuple[Part, ...], assignments: Mapping[str, Any]) -> tuple[Part, ...]:
    path, kind = f"{slot}.{name}", SEVERAL[slot]
    if "" in assignments:
        if len(assignments) > 1:
            raise InputError(f"{path} is removed and set in one call; do one of them")
        whole = assignments[""]
        if whole is not None:
            raise not_removed(path, whole)
        return tuple(part for part in parts if part.name != name)
    if all(part.name != name for part in parts):
        parts = (*parts, lookup(kind, name)())
    return tuple(_set(path, part, assignments) if part.name == name else part for part in parts)


def _replace(algorithm: Algorithm, slots: Mapping[str, Any], settings: Mapping[str, Any]) -> Algorithm:
    inner = {slot.removeprefix("objective."): value for slot, value in slots.items() if slot.startswith("objective.")}
    outer = {slot: value for slot, value in slots.items() if not slot.startswith("objective.")}
    objective = dataclasses.replace(algorithm.objective, **inner)
    return dataclasses.replace(algorithm, objective=objective, settings=settings, **outer)


def differences(left: Algorithm, right: Algorithm) -> dict[str, tuple[Any, Any]]:
    """The paths at which two algorithms differ, with (left, right) values; None if one side has no such part or field."""
    flat_left, flat_right = flatten(left), flatten(right)
    paths = [*flat_left, *(path for path in flat_right if path not in flat_left)]
    return {
        path: (flat_left.get(path), flat_right.get(path)) for path in paths if flat_left.get(path) != flat_right.get(path)
    }


def parts_of(algorithm: Algorithm) -> list[tuple[str, Part]]:
    """Every part of an algorithm with its slot."""
    single = [(slot, _get(algorithm, slot)) for slot in ONE]
    return single + [(slot, part) for slot in SEVERAL for part in _get(algorithm, slot)]


def flatten(algorithm: Algorithm) -> dict[str, Any]:
    """Every slot and field of an algorithm by its path. A user's part appears as its import path."""
    flat: dict[str, Any] = {}
    for slot in ONE:
        part = _get(algorithm, slot)
        flat[slot] = reference_of(part)
        flat.update(_fields(slot, part))
    for slot in SEVERAL:
        parts = _get(algorithm, slot)
        flat[slot] = tuple(map(reference_of, parts))
        for part in parts:
            flat.update(_fields(f"{slot}.{part.name}", part))
    flat.update({f"settings.{name}": value for name, value in algorithm.settings.items()})
    return flat


def _fields(path: str, part: Part) -> dict[str, Any]:
    return {f"{path}.{f.name}": getattr(part, f.name) for f in dataclasses.fields(part)}  # type: ignore[arg-type]
