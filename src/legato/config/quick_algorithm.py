"""Checks the algorithm of recipes and words without importing torch: slots, names of parts, their fields and values.

`choose.py` makes the algorithm and finds the rest: values that do not go together, and faults of a user's own parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from legato.config.messages import refusal, unknown_algorithm
from legato.config.names import ALGORITHMS, KINDS, PARTS
from legato.config.sources import Layer, algorithm_changes
from legato.core.fields import rule_of_form
from legato.core.importing import is_import_path
from legato.core.slots import ONE, SEVERAL, not_a_list, not_a_name, not_removed, split_path, unknown_field, unknown_part
from legato.errors import InputError

_DEFAULT = "gspo"
"""The algorithm of a run that names none."""


def faults_of_algorithm(layers: Sequence[Layer], *, whole: bool) -> list[str]:
    """A line for each change of the algorithm that cannot be made. InputError if there is no algorithm of its name.

    Not `whole`: the algorithm, and parts of the user's own, may be named elsewhere.
    """
    faults: list[str] = []
    read = [algorithm_changes(layer, faults) for layer in layers]
    changes = [each for each, _ in read]
    name = _name_of(layers, changes)
    parts = dict(PARTS.get(name or (_DEFAULT if whole else ""), {}))
    own = not whole or any(map(_names_own_code, changes))
    for each, places in read:
        slots = {path: value for path, value in each.items() if path in ONE or path in SEVERAL}
        wrong = dict(_faults_of_slots(slots))
        after = parts | {slot: value for slot, value in slots.items() if slot in ONE}
        if not wrong:
            wrong = dict(_faults_of_fields({path: each[path] for path in each if path not in slots}, after, own=own))
        faults += [f"algorithm.{path} ({places[path]}): {wrong[path]}" for path in each if path in wrong]
        if not wrong:
            parts = after
    return faults


def _name_of(layers: Sequence[Layer], changes: Sequence[Mapping[str, Any]]) -> str | None:
    """The algorithm that the highest source names; None if none does. InputError if no algorithm can have that name."""
    for layer in reversed(layers):
        table = layer.at(("algorithm",))
        if not isinstance(table, dict) or "name" not in table:
            continue
        name, origin = table["name"], layer.origin(("algorithm", "name"))
        if not isinstance(name, str):
            raise InputError(refusal(("algorithm", "name"), name, origin, f"a name ({', '.join(ALGORITHMS)})"))
        missing = [slot for slot in ONE if all(slot not in each for each in changes)]
        if name not in ALGORITHMS and missing:
            raise InputError(unknown_algorithm(name, origin, ALGORITHMS, missing))
        return name
    return None


def _names_own_code(changes: Mapping[str, Any]) -> bool:
    """Whether a part comes from a user's file. Such a file may register further parts, under names of its own."""
    values = [item for value in changes.values() for item in (value if isinstance(value, list) else [value])]
    return any(isinstance(value, str) and is_import_path(value) for value in values)


def _faults_of_slots(slots: Mapping[str, Any]) -> Iterator[tuple[str, InputError]]:
    for slot, value in slots.items():
        if slot in SEVERAL and not isinstance(value, list):
            yield slot, not_a_list(slot, None if value is False else value)
            continue
        kind = ONE.get(slot) or SEVERAL[slot]
        for item in value if slot in SEVERAL else [None if value is False else value]:
            if not isinstance(item, str):
                yield slot, not_a_name(slot, kind, item)
            elif not is_import_path(item) and item not in KINDS[kind]:
                yield slot, unknown_part(kind, item, list(KINDS[kind]))
            else:
                continue
            break


def _faults_of_fields(
    changes: Mapping[str, Any], parts: Mapping[str, str], *, own: bool
) -> Iterator[tuple[str, InputError]]:
    """Faults of paths below a slot. `parts`: the part in each slot of one. `own`: other parts than ours may exist."""
    for path, value in changes.items():
        try:
            slot, rest = split_path(path)
            kind = ONE.get(slot) or SEVERAL[slot]
            name, _, field = (parts.get(slot, ""), "", rest) if slot in ONE else rest.partition(".")
            where = slot if slot in ONE else f"{slot}.{name}"
            if not field:
                if value is not None and value is not False:
                    raise not_removed(where, value)
            elif name in KINDS[kind]:
                _check_field(where, kind, name, field, value)
            elif slot in SEVERAL and not own:
                raise unknown_part(kind, name, list(KINDS[kind]))
        except InputError as error:
            yield path, error


def _check_field(where: str, kind: str, name: str, field: str, value: Any) -> None:
    fields = KINDS[kind][name]["fields"]
    if field not in fields:
        raise unknown_field(where, kind, name, field, list(fields))
    rule = rule_of_form(fields[field]["rule"])
    value = tuple(value) if isinstance(value, list) else value
    if value is not None and value is not False and not rule.takes(value):
        raise InputError(f"override of {where}: {kind} '{name}'.{field}: expected {rule.expected}, got {value!r}")
