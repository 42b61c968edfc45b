"""The result of loading a configuration: checked values, the origin of each, and `dump`, which writes them as TOML."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.override import flatten as flatten_algorithm
from legato.config.schema import Config
from legato.core.importing import OwnCode
from legato.core.parts import Part, reference_of
from legato.core.slots import ONE, SEVERAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The configuration of a run."""

    config: Config
    algorithm: Algorithm
    """The named algorithm with all changes made."""
    deviations: tuple[str, ...]
    """Each difference from the named algorithm as published, in words; or that it has no published form."""
    provenance: Mapping[str, str]
    """Where the value at each path came from: "recipes/x.toml:12", "word 3: training.lr=1", "algorithm gspo", "default"."""
    code: tuple[OwnCode, ...] = ()
    """The user's files that parts of the algorithm come from."""
    notes: tuple[str, ...] = ()
    """Each option that was fitted to options given by hand, in words (`clamp.py`)."""

    @property
    def values(self) -> dict[str, Any]:
        """Every value by its dotted path; `provenance` has the same paths."""
        return {**flatten(self.config), **algorithm_values(self.algorithm)}


_BY_NAME = ("components", "sets")
"""Fields that hold tables by names of the writer's choice."""


def flatten(section: Any, prefix: str = "") -> dict[str, Any]:
    """The options of a configuration by dotted path. Options of a kind stand beside `kind`; an absent table is None."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        path, value = prefix + field.name, getattr(section, field.name)
        if field.name == "options":
            flat |= {prefix + name: option for name, option in value.items()}
        elif dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{path}.")
        elif field.name in _BY_NAME:
            flat |= {key: v for name, each in value.items() for key, v in flatten(each, f"{path}.{name}.").items()}
        elif field.name != "changes":
            flat[path] = value
    return flat


def algorithm_values(algorithm: Algorithm) -> dict[str, Any]:
    """The slots and fields of an algorithm by their paths in a configuration, without its settings: they are run options."""
    flat = flatten_algorithm(algorithm).items()
    return {f"algorithm.{path}": value for path, value in flat if not path.startswith("settings.")}


def dump(resolved: Resolved) -> str:
    """The configuration as TOML. Loading the text gives the same configuration and the same algorithm."""
    tree = _tree(resolved.config)
    for path in resolved.algorithm.settings:
        _switch_off(tree, resolved.config, path.split("."))
    return tomli_w.dumps({**tree, "algorithm": _algorithm_tree(resolved.algorithm)})


def _tree(section: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if field.name == "options":
            tree |= {name: False if option is None else option for name, option in value.items()}
        elif field.name in _BY_NAME:
            tree[field.name] = {name: _tree(each) for name, each in value.items()}
        elif dataclasses.is_dataclass(value):
            tree[field.name] = _tree(value)
        elif value is not None:
            tree[field.name] = list(value) if isinstance(value, tuple) else value
    return tree


def _switch_off(tree: dict[str, Any], section: Any, words: list[str]) -> None:
    """Write `false` for an option that the algorithm sets and the run switched off. TOML has no null."""
    value = getattr(section, words[0])
    if value is None:
        tree[words[0]] = False
    elif len(words) > 1:
        _switch_off(tree[words[0]], value, words[1:])


def _algorithm_tree(algorithm: Algorithm) -> dict[str, Any]:
    """The algorithm table for TOML, with whole paths as keys.

    One TOML key cannot hold both the name of a part and the fields of that part. The table names the part of each slot and
    sets every field, so it describes any algorithm completely: published, or made in Python.
    """
    tree: dict[str, Any] = {"name": algorithm.name}
    for slot in (*ONE, *SEVERAL):
        value: Any = algorithm
        for word in slot.split("."):
            value = getattr(value, word)
        tree[slot] = [reference_of(part) for part in value] if isinstance(value, tuple) else reference_of(value)
        for part in value if isinstance(value, tuple) else (value,):
            tree |= part_tree(f"{slot}.{part.name}" if isinstance(value, tuple) else slot, part)
    return tree


def part_tree(path: str, part: Part) -> dict[str, Any]:
    """The fields of a part by whole paths. A field that is None although its default is not becomes `false`."""
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if value is None and field.default is not None:
            tree[f"{path}.{field.name}"] = False
        elif value is not None:
            tree[f"{path}.{field.name}"] = list(value) if isinstance(value, tuple) else value
    return tree
