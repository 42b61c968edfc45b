"""The slots of an algorithm and the paths of its overrides. Loads no torch, so that mistakes are told in a moment."""

from collections.abc import Sequence

from legato.errors import InputError, nearest

ONE = {"advantage": "advantage", "aggregate": "aggregate", "objective.ratio": "ratio"}
"""Slot that holds one part -> kind of part."""
SEVERAL = {
    "filters": "filter",
    "objective.trust": "trust",
    "objective.corrections": "correction",
    "objective.penalties": "penalty",
}
"""Slot that holds several parts -> kind of part."""
_SLOTS = sorted([*ONE, *SEVERAL, "settings"])


def split_path(path: str) -> tuple[str, str]:
    """The slot of a dotted path and the rest of the path; InputError if no slot has that name."""
    for slot in _SLOTS:
        if path == slot or path.startswith(slot + "."):
            return slot, path[len(slot) + 1 :]
    for slot in _SLOTS:
        if f"objective.{path}".startswith(slot + "."):
            raise InputError(f"override path {path!r} does not exist; did you mean 'objective.{path}'?")
    raise InputError(f"override path {path!r} does not exist; {nearest('.'.join(path.split('.')[:2]), _SLOTS)}")


def unknown_part(kind: str, name: str, known: Sequence[str]) -> InputError:
    """The error for a name that no part of a kind has."""
    return InputError(f"unknown {kind} {name!r}; {nearest(name, sorted(known))}")


def unknown_field(path: str, kind: str, name: str, field: str, known: Sequence[str]) -> InputError:
    """The error for a field that a part does not have. `path`: of the part."""
    hint = nearest(field, known) if known else f"{kind} {name!r} has no fields"
    return InputError(f"override path '{path}.{field}' does not exist in {kind} {name!r}; {hint}")


def not_removed(path: str, value: object) -> InputError:
    """The error for a value in place of a whole part in a slot of several."""
    return InputError(f"{path}: expected None (to remove it) or a field below it, got {value!r}")


def not_a_name(path: str, kind: str, value: object) -> InputError:
    """The error for a value that cannot name a part."""
    return InputError(f"{path}: expected the name of a {kind} or such a part, got {value!r}")


def not_a_list(slot: str, value: object) -> InputError:
    """The error for a value in place of the list of a slot of several."""
    return InputError(f"{slot}: expected a list of {SEVERAL[slot]} names or parts, got {value!r}")
