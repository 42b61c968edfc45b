"""From sources to one checked configuration.

    resolved = load([Path("recipes/tiny.toml")], ["training.lr=1e-4", "algorithm=grpo"])
    resolved.config.training.lr;  resolved.algorithm;  resolved.deviations;  resolved.provenance["training.lr"]

Sources, low to high: the defaults, the settings of the named algorithm, TOML files from left to right, `path=value` words,
values given in Python. Whatever is wrong is told in one ValueError, a line for each mistake.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import entry, is_published
from legato.algorithms.override import ONE, SEVERAL, override, parts_of
from legato.config import choose
from legato.config.checks import Case, disagreements
from legato.config.resolved import Resolved, algorithm_values, dump, flatten
from legato.config.schema import AlgorithmName, Config
from legato.config.sources import Layer, from_file, from_overrides, from_settings, from_words
from legato.config.validate import merge, validate
from legato.core.importing import OwnCode
from legato.core.parts import code_of, lookup
from legato.errors import InputError

__all__ = ["Resolved", "dump", "flatten", "load"]

MADE_IN_PYTHON = "made in Python, or of its parts in a recipe: it has no published form"


def load(sources: Sequence[Path], words: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> Resolved:
    """The configuration that files, words and values given in Python describe."""
    layers = [*map(from_file, sources), from_words(words), from_overrides(overrides or {})]
    faults: list[str] = []
    base, named_at = choose.named(layers, AlgorithmName().name)
    given = Layer()
    for layer in (from_settings(base.name, base.settings), *layers):
        merge(given, layer)
    _reward_of_environment(given)
    algorithm, changed_at = choose.changed(base, layers, faults)
    config = validate(given, faults)
    if config is None or faults:
        raise InputError("\n".join(dict.fromkeys(faults)))
    # An algorithm of one's own deviates from nothing; its settings have been taken into the run like any other.
    own = dataclasses.replace(base, settings={})
    published = entry(base.name).value if is_published(base.name) else own
    config, algorithm = _filled(config, algorithm, given, changed_at)
    # What the value itself would set has been taken into the run; what is left are the published settings.
    algorithm = dataclasses.replace(algorithm, settings=published.settings)
    changes = choose.changes_of(published, algorithm)
    config = dataclasses.replace(config, algorithm=AlgorithmName(name=published.name, changes=changes))
    origin = _origins(config, algorithm, published, given, {**changed_at, "name": named_at})
    found = list(disagreements(Case(config=config, algorithm=algorithm, origin=origin)))
    if found:
        raise InputError("\n".join(found))
    values = {**flatten(config), **algorithm_values(algorithm)}
    return Resolved(
        config=config,
        algorithm=algorithm,
        deviations=tuple(choose.deviations(published, algorithm, values)) if is_published(base.name) else (MADE_IN_PYTHON,),
        provenance={path: origin(path) for path in values},
        code=_code(algorithm),
    )


def _reward_of_environment(given: Layer) -> None:
    """An environment gives rewards itself; they are the reward where no other is named."""
    reward = {} if given.at(("reward",)) is None else given.at(("reward",))
    if given.at(("task", "environment")) and isinstance(reward, dict) and not {"kind", "components"} & set(reward):
        given.put(("reward", "kind"), "environment", lambda _: "task.environment")


def _code(algorithm: Algorithm) -> tuple[OwnCode, ...]:
    """The user's files that parts come from. A part that the written configuration could not name is refused."""
    found: dict[str, OwnCode] = {}
    for slot, part in parts_of(algorithm):
        try:
            code = code_of(part)
            if code is not None and lookup(part.kind, code.reference) is not type(part):
                raise InputError(
                    f"expected the class that stands at {code.reference!r}, got another one of that name; import it once"
                )
        except InputError as error:
            raise InputError(f"algorithm.{slot}, {part.kind} {part.name!r}: {error}") from None
        if code is not None:
            found[code.reference] = code
    return tuple(found.values())


def _filled(config: Config, algorithm: Algorithm, given: Layer, changed_at: dict[str, str]) -> tuple[Config, Algorithm]:
    """What follows from other options: the constant of an aggregate, and one stage where there is no second task."""
    if getattr(algorithm.aggregate, "constant", 0.0) is None:
        algorithm = override(algorithm, {"aggregate.constant": config.rollouts.max_response_tokens})
        changed_at["aggregate.constant"] = "rollouts.max_response_tokens"
    # Only a stage the algorithm asks for is given up; one that a person asks for is missed aloud.
    asked_by_algorithm = given.origin(("task", "stages")).startswith("algorithm ")
    if config.task.stages == 2 and config.task.second is None and asked_by_algorithm:
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, stages=1))
        given.put(("task", "stages"), 1, lambda _: "there is no task.second")
    return config, algorithm


def _origins(
    config: Config, algorithm: Algorithm, published: Algorithm, given: Layer, changed_at: Mapping[str, str]
) -> Callable[[str], str]:
    """Where the value at a dotted path came from."""
    # Names may hold dots: the paths of the sources are joined as those of the values are, never split.
    places = {".".join(path): place for path, place in given.origins.items()}
    before, after = algorithm_values(published), algorithm_values(algorithm)
    slots = {*ONE, *SEVERAL}

    def origin(path: str) -> str:
        if not path.startswith("algorithm."):
            return places.get(path, "default")
        inner = path.removeprefix("algorithm.")
        below = [place for known, place in changed_at.items() if known.startswith(f"{inner}.")]
        if inner in changed_at:
            return changed_at[inner]
        if path in before and before[path] == after.get(path):
            return f"algorithm {published.name}"
        # A part that came with one of its fields, or was removed, is told by what did it.
        return below[-1] if inner in slots and below else "default"

    return origin
