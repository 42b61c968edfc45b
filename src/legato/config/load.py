"""Loads the sources of a configuration, merges and checks them.

    resolved = load([Path("recipes/tiny.toml")], ["training.lr=1e-4", "algorithm=grpo"])
    resolved.config.training.lr;  resolved.algorithm;  resolved.deviations;  resolved.provenance["training.lr"]

Sources, low to high: the defaults, the settings of the named algorithm, a translated configuration of TRL, TOML files from
left to right, `path=value` words, values given in Python. All faults are raised in one InputError, a line for each.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import entry, is_published
from legato.algorithms.override import override, parts_of
from legato.config import ahead, choose, kinds, lora_lr
from legato.config.checks import Case, disagreements
from legato.config.clamp import clamp
from legato.config.read import find_recipe
from legato.config.recipe_runs import untested_notes
from legato.config.resolved import Resolved, algorithm_values, dump, flatten
from legato.config.schema import AlgorithmName, Config
from legato.config.sections import section_of
from legato.config.sources import Layer, from_file, from_overrides, from_settings, from_words
from legato.config.unknown import verl_options
from legato.config.validate import merge, reward_of_environment, validate
from legato.core.importing import OwnCode
from legato.core.parts import code_of, lookup
from legato.core.slots import ONE, SEVERAL
from legato.errors import InputError

__all__ = ["Resolved", "dump", "flatten", "load"]

MADE_IN_PYTHON = "made in Python, or of its parts in a recipe: it has no published form"


def load(
    sources: Sequence[Path],
    words: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    *,
    lowest: Layer | None = None,
) -> Resolved:
    """The checked configuration from files, words and values given in Python, above the options of `lowest`."""
    layers = [*([] if lowest is None else [lowest]), *map(from_file, sources), from_words(words)]
    layers.append(from_overrides(overrides or {}))
    faults = [line for layer in layers for line in verl_options(layer)]
    if faults:
        raise InputError("\n".join(faults))
    base, name_origin = choose.choose_algorithm(layers, AlgorithmName().name)
    merged, root = Layer(), section_of(Config)
    for layer in (from_settings(base.name, base.settings), *layers):
        merge(merged, layer, root)
    reward_of_environment(merged)
    algorithm, changed_at = choose.apply_changes(base, layers, faults)
    config: Config | None = validate(merged, faults, root, kinds.find_section)
    if config is None or faults:
        raise InputError("\n".join(dict.fromkeys(faults)))
    # The user's own algorithm deviates from nothing. Its settings were merged into the run like any other.
    own = dataclasses.replace(base, settings={})
    published = entry(base.name).value if is_published(base.name) else own
    config, algorithm, chosen = _fill_dependent(config, algorithm, merged, changed_at)
    # Settings of an algorithm made in Python are already merged into the run; only the published ones remain.
    algorithm = dataclasses.replace(algorithm, settings=published.settings)
    changes = choose.changes_of(published, algorithm)
    config = dataclasses.replace(config, algorithm=AlgorithmName(name=published.name, changes=changes))
    origin = _origins(config, algorithm, published, merged, {**changed_at, "name": name_origin})
    fitted = clamp(config, algorithm, origin)
    config = fitted.config
    conflicts = list(disagreements(Case(config=config, algorithm=algorithm, origin=origin)))
    if conflicts:
        raise InputError("\n".join(conflicts))
    values = {**flatten(config), **algorithm_values(algorithm)}
    return Resolved(
        config=config,
        algorithm=algorithm,
        deviations=tuple(choose.deviations(published, algorithm, values)) if is_published(base.name) else (MADE_IN_PYTHON,),
        provenance={path: fitted.changes.get(path) or origin(path) for path in values},
        code=_own_files(algorithm),
        notes=(*fitted.notes, *chosen, *untested_notes([find_recipe(path) for path in sources])),
    )


def _own_files(algorithm: Algorithm) -> tuple[OwnCode, ...]:
    """The user's files that parts come from. A part that config.toml could not name is refused."""
    files: dict[str, OwnCode] = {}
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
            files[code.reference] = code
    return tuple(files.values())


def _fill_dependent(
    config: Config, algorithm: Algorithm, merged: Layer, changed_at: dict[str, str]
) -> tuple[Config, Algorithm, list[str]]:
    """Fill in options that follow from others: the constant of an aggregate, one stage if there is no second task, the
    learning rate of adapters, and the anchor and the correction of a run that samples ahead. Also returns notes."""
    if getattr(algorithm.aggregate, "constant", 0.0) is None:
        algorithm = override(algorithm, {"aggregate.constant": config.rollouts.max_response_tokens})
        changed_at["aggregate.constant"] = "rollouts.max_response_tokens"
    # Drop a second stage that only the algorithm wants. If the user wants one, `checks.py` reports the missing task.
    from_algorithm = merged.origin(("task", "stages")).startswith("algorithm ")
    if config.task.stages == 2 and config.task.second is None and from_algorithm:
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, stages=1))
        merged.put(("task", "stages"), 1, lambda _: "there is no task.second")
    if config.policy.lora is not None and merged.at(("training", "lr")) is None:
        lr = round(lora_lr.FACTOR * config.training.lr, 12)  # 1e-05 and not 9.999999999999999e-06
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, lr=lr))
        merged.put(("training", "lr"), lr, lambda _: lora_lr.ORIGIN)
    notes: list[str] = []
    if config.rollouts.ahead:
        if config.training.anchor == "auto":
            config = dataclasses.replace(config, training=dataclasses.replace(config.training, anchor="recompute"))
            merged.put(("training", "anchor"), "recompute", lambda _: ahead.ORIGIN)
        if not ahead.corrects_sampler(algorithm):
            by_user = any(path.partition("objective.corrections")[1] for path in changed_at)
            if by_user:
                note = "nothing corrects for responses that are older than the policy (algorithm.objective.corrections)"
            else:
                algorithm, note = ahead.add_correction(algorithm)
                changed_at["objective.corrections"] = ahead.ORIGIN
            notes.append(f"rollouts.ahead = {config.rollouts.ahead}: {note}")
    return config, algorithm, notes


def _origins(
    config: Config, algorithm: Algorithm, published: Algorithm, merged: Layer, changed_at: Mapping[str, str]
) -> Callable[[str], str]:
    """A function from a dotted path to the origin of its value."""
    # Names may contain dots: paths are joined and compared, never split.
    places = {".".join(path): place for path, place in merged.origins.items()}
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
        # A part that was added by setting one of its fields, or removed, has the origin of that change.
        return below[-1] if inner in slots and below else "default"

    return origin
