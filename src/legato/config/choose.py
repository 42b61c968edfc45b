"""Chooses the algorithm of a run: its name comes from the highest source, then every source may change it, low to high."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import algorithm_names, entry, is_published
from legato.algorithms.override import build_part, differences, flatten, override
from legato.config.messages import refusal, show_value, unknown_algorithm
from legato.config.sources import Layer, algorithm_changes
from legato.core.slots import ONE, SEVERAL
from legato.errors import InputError
from legato.objectives.objective import Objective

NAME = ("algorithm", "name")


def choose_algorithm(layers: Sequence[Layer], default: str) -> tuple[Algorithm, str]:
    """The algorithm that the highest source names, and the origin of that name. An `Algorithm` value is used as it is.

    A name that is not published means the user's own algorithm, whose slots the sources must fill.
    """
    for layer in reversed(layers):
        table = layer.at(("algorithm",))
        if isinstance(table, dict) and "name" in table:
            name, origin = table["name"], layer.origin(NAME)
            if isinstance(name, Algorithm):
                return name, origin
            if not isinstance(name, str):
                raise InputError(refusal(NAME, name, origin, f"a name ({', '.join(algorithm_names())})"))
            return entry(name).value if is_published(name) else _own_algorithm(name, origin, layers), origin
    return entry(default).value, "default"


def _own_algorithm(name: str, origin: str, layers: Sequence[Layer]) -> Algorithm:
    """The user's own algorithm, built from the slots that hold one part. Slots of several parts start empty."""
    slots: dict[str, Any] = {}
    for layer in layers:
        slots |= {path: value for path, value in algorithm_changes(layer, [])[0].items() if path in ONE}
    missing = [slot for slot in ONE if slot not in slots]
    if missing:
        raise InputError(unknown_algorithm(name, origin, algorithm_names(), missing))
    try:
        parts: dict[str, Any] = {slot: build_part(ONE[slot], f"algorithm.{slot}", value) for slot, value in slots.items()}
        objective = Objective(ratio=parts.pop("objective.ratio"))
        return Algorithm(name=name, objective=objective, **parts)
    except (TypeError, OverflowError) as error:
        raise InputError(f"algorithm ({origin}): {error}") from None


def apply_changes(algorithm: Algorithm, layers: Sequence[Layer], faults: list[str]) -> tuple[Algorithm, dict[str, str]]:
    """The algorithm with the changes of all sources, and the origin of each changed path."""
    origins: dict[str, str] = {}
    for layer in layers:
        changes, places = algorithm_changes(layer, faults)
        changes = _false_to_none(algorithm, changes)
        try:
            algorithm = override(algorithm, changes)
        except (ValueError, TypeError, OverflowError) as error:
            faults.extend(_describe_faults(algorithm, changes, places, error))
        for path in sorted(changes):
            origins = {known: place for known, place in origins.items() if not known.startswith(f"{path}.")}
            origins[path] = places[path]
    return algorithm, origins


def _false_to_none(algorithm: Algorithm, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `false` by None if the option does not allow false (a limit, a part to be removed): TOML has no null."""
    slots = {path: value for path, value in changes.items() if path in ONE or path in SEVERAL}
    return {
        path: None if value is False and _override_error(algorithm, {**slots, path: value}) else value
        for path, value in changes.items()
    }


def _override_error(algorithm: Algorithm, changes: Mapping[str, Any]) -> Exception | None:
    try:
        override(algorithm, changes)
    except (ValueError, TypeError, OverflowError) as error:
        return error
    return None


def _describe_faults(
    algorithm: Algorithm, changes: Mapping[str, Any], places: Mapping[str, str], together: Exception
) -> Iterator[str]:
    """One line per change that fails alone; if none does, one line for the changes that fail together."""
    slots = {path: value for path, value in changes.items() if path in ONE or path in SEVERAL}
    single = [
        f"algorithm.{path} ({places[path]}): {error}"
        for path, value in changes.items()
        if (error := _override_error(algorithm, {path: value} if path in slots else {**slots, path: value}))
        and (path in slots or not _override_error(algorithm, slots))
    ]
    where = sorted({places[path] for path in changes if path.rpartition(".")[0] in str(together)})
    yield from single or [f"algorithm ({', '.join(where or places.values())}): {together}"]


def changes_of(published: Algorithm, algorithm: Algorithm) -> dict[str, Any]:
    """The changed values by path; None for removed parts and fields."""
    return {path: new for path, (_, new) in differences(published, algorithm).items() if not path.startswith("settings.")}


def deviations(published: Algorithm, algorithm: Algorithm, values: Mapping[str, Any]) -> Iterator[str]:
    """One line per difference from the published algorithm. `values` are the options of the run by path."""
    before, after, name = flatten(published), flatten(algorithm), published.name
    budget = values["rollouts.max_response_tokens"]
    for path in changes_of(published, algorithm):
        if path not in after:
            continue  # a field of a removed part; the line of its slot covers it
        if path == "aggregate.constant" and path in before and before[path] is None:
            if after[path] != budget:
                yield f"{path} = {_show(after[path])} ({name}: the response budget, {budget})"
        elif path not in before:
            yield f"{path} = {_show(after[path])} (not in {name})"
        else:
            yield f"{path} = {_show(after[path])} ({name}: {_show(before[path])})"
    for path, wanted in published.settings.items():
        if values.get(path) != wanted:
            why = ": there is no task.second" if path == "task.stages" else ""
            yield f"{path} = {_show(values.get(path))} ({name}: {_show(wanted)}){why}"


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return "off" if value is None else str(value) if isinstance(value, str) else show_value(value)
