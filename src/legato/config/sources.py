"""The sources of a configuration: each becomes a `Layer`, a tree of options that knows the origin of its values."""

import datetime
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path as File
from typing import Any

from legato.config.locate import Path, locate, locate_items
from legato.config.messages import show_value
from legato.config.peers import VERL
from legato.config.read import read_file
from legato.core.slots import ONE, SEVERAL
from legato.errors import InputError

DEEPEST = 24
"""Deepest nesting of tables. No option is that deep, and functions that walk the tree are recursive."""

_SLOT_HEADS = sorted({slot.partition(".")[0] for slot in (*ONE, *SEVERAL)})
"""The first words of the slots of an algorithm: objective, advantage ..."""

_PLAIN = (str, bool, int, float, datetime.date, datetime.time)
"""Types that TOML can store; a datetime is a date."""


@dataclass(slots=True, kw_only=True)
class Layer:
    """A tree of options, and the origin of each."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)

    def origin(self, path: Path) -> str:
        """The origin of the value at a path, or of the nearest enclosing table that has one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return "default"

    def put(self, path: Path, value: Any, origin: Callable[[Path], str]) -> None:
        """Set a value. Tables are merged; any other value replaces the old value and its origins."""
        table = self.tree
        for depth, word in enumerate(path[:-1], start=1):
            if not isinstance(table.get(word), dict):
                self._forget(path[:depth])
                table[word] = {}
            self.origins.setdefault(path[:depth], origin(path))
            table = table[word]
        present = table.get(path[-1])
        if isinstance(value, dict) and isinstance(present, dict):
            self.origins[path] = origin(path)
        else:
            self._forget(path)
            table[path[-1]] = {} if isinstance(value, dict) else value
            self.origins[path] = origin(path)
        if isinstance(value, dict):
            for key, inner in value.items():
                self.put((*path, key), inner, origin)

    def drop(self, path: Path) -> None:
        """Remove a value and its origins."""
        table: Any = self.tree
        for word in path[:-1]:
            table = table[word]
        table.pop(path[-1], None)
        self._forget(path)

    def at(self, path: Path) -> Any:
        """The value at a path; None if there is none."""
        value: Any = self.tree
        for word in path:
            value = value.get(word) if isinstance(value, dict) else None
        return value

    def _forget(self, path: Path) -> None:
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]


def from_file(path: File) -> Layer:
    """The options of a TOML file, with `file:line` as origins."""
    text, tree = read_file(path)
    check_tree(tree, str(path))
    if "algorithm" in tree and not isinstance(tree["algorithm"], dict):
        tree["algorithm"] = {"name": tree["algorithm"]}
    text = text.replace("\r\n", "\n")
    origins = {keys: f"{path}:{line}" for keys, line in {**locate_items(text), **locate(text)}.items()}
    layer = Layer(tree=tree, origins=origins)
    name_sets(layer)
    return _gather_algorithm(layer)


def _gather_algorithm(layer: Layer) -> Layer:
    """Move slots of the algorithm that stand at the top, as in [objective.trust.clip], into the table of the algorithm."""
    for head in [name for name in layer.tree if name in _SLOT_HEADS]:
        value, origins = layer.tree[head], dict(layer.origins)
        layer.drop((head,))
        layer.put(("algorithm", head), value, lambda path, origins=origins: _nearest_origin(origins, path[1:]))  # type: ignore[misc]
    return layer


def _nearest_origin(origins: Mapping[Path, str], path: Path) -> str:
    return Layer(origins=dict(origins)).origin(path)


def from_words(words: Sequence[str]) -> Layer:
    """The options of `path=value` words; the last one wins."""
    layer = Layer()
    for index, word in enumerate(words, start=1):
        origin = f"word {index}: {word if word.isprintable() else repr(word)}"
        path, value = read_word(word, f"word {index}")
        check_tree({"": value}, origin)
        layer.put(_keys(path, value, origin), value, lambda _, origin=origin: origin)  # type: ignore[misc]
        name_sets(layer)
    return layer


def from_overrides(overrides: Mapping[str, Any]) -> Layer:
    """Values given in Python by dotted path. A mapping sets the options below its path."""
    layer = Layer()
    for path, native in overrides.items():
        origin = f"override {path!r}"
        value = _native(native, origin)
        check_tree({"": value}, origin)
        layer.put(_keys(path, value, origin), value, lambda _, origin=origin: origin)  # type: ignore[misc]
        name_sets(layer)
    return layer


SETS = ("evaluation", "sets")
_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""A set's name stands in metric keys (eval/NAME/avg@16) and in words (evaluation.sets.NAME.problems=8)."""


def name_sets(layer: Layer) -> None:
    """Turn the list of `[[evaluation.sets]]` into tables by name, so that sources merge set by set.

    A string in place of a set is the name of its task; a string in place of the table of a task or a reward is its kind.
    """
    listed = layer.at(SETS)
    if isinstance(listed, list):
        tables: dict[str, Any] = {}
        for place, each in enumerate(listed):
            where = layer.origin((*SETS, str(place)))
            name, table = _named_set(each, place, where)
            if name in tables:
                raise InputError(f"evaluation.sets[{place}]: expected a name of its own, got {name!r} again ({where})")
            tables[name] = table
            for path in [path for path in layer.origins if path[:3] == (*SETS, str(place))]:
                layer.origins[(*SETS, name, *path[3:])] = layer.origins.pop(path)
        layer.tree["evaluation"]["sets"] = tables
    named = layer.at(SETS)
    for name, table in named.items() if isinstance(named, dict) else ():
        if not _SET_NAME.fullmatch(name):
            raise InputError(
                f"evaluation.sets: expected a name of letters, digits, - and _, got {show_value(name)}"
                f" ({layer.origin((*SETS, name))})"
            )
        for part in ("task", "reward"):
            if isinstance(table, dict) and isinstance(table.get(part), str):
                origin = layer.origin((*SETS, name, part))
                layer.put((*SETS, name, part), {"kind": table[part]}, lambda _, origin=origin: origin)  # type: ignore[misc]


def _named_set(each: Any, place: int, where: str) -> tuple[str, dict[str, Any]]:
    """The name of an entry of the list, and its table without it."""
    if isinstance(each, str):
        each = {"name": each, "task": each}
    name = each.get("name") if isinstance(each, dict) else None
    if not isinstance(name, str) or not _SET_NAME.fullmatch(name):
        got = "none" if isinstance(each, dict) and name is None else show_value(name if isinstance(each, dict) else each)
        raise InputError(
            f"evaluation.sets[{place}]: expected a table with a name of letters, digits, - and _, or the name of a task, got"
            f' {got} ({where}); write name = "..."'
        )
    return name, {key: value for key, value in each.items() if key != "name"}


def algorithm_changes(layer: Layer, faults: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The changes of one source to its algorithm by dotted path, and the origin of each. Adds faults of single changes."""
    changes: dict[str, Any] = {}
    places: dict[str, str] = {}

    def walk(table: Mapping[str, Any], words: tuple[str, ...]) -> None:
        for key, value in table.items():
            path, origin = ".".join((*words, key)), layer.origin(("algorithm", *words, key))
            if path == "name" or f"algorithm.{path}" in VERL:
                continue  # `unknown.verl_options` answers options of verl
            if path == "settings" or path.startswith("settings."):
                faults.append(
                    f"algorithm.{path} ({origin}) cannot be set here; set the option of the run, as in training.lr"
                )
            elif isinstance(value, dict) and value:
                walk(value, (*words, key))
            elif isinstance(value, dict):
                faults.append(f"algorithm.{path}: expected a slot or a field in the table, got an empty table ({origin})")
            else:
                changes[path], places[path] = value, origin

    walk(layer.at(("algorithm",)) or {}, ())
    return changes, places


def from_settings(algorithm: str, settings: Mapping[str, Any]) -> Layer:
    """The options that a named algorithm sets."""
    layer = Layer()
    for path, value in settings.items():
        layer.put(tuple(path.split(".")), value, lambda _: f"algorithm {algorithm}")
    return layer


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command into names and `path=value` options. A recipe may have "=" in its path."""
    options = [word for word in words if "=" in word and not (word.endswith(".toml") and File(word).is_file())]
    return [word for word in words if word not in options], options


def read_word(word: str, name: str = "the word") -> tuple[str, Any]:
    """Parse `path=value`. The value is read as TOML if possible, `null` is None, anything else is the bare string."""
    path, equals, text = word.partition("=")
    if not equals:
        raise InputError(f"expected path=value, as in training.lr=1e-6, got {word!r} ({name})")
    text = text.strip()
    if text == "null":
        return path.strip(), None
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return path.strip(), text
    # A line break in the word could smuggle in a second key; a date is far more often a name than a date.
    whole = list(read) == ["value"] and not isinstance(read["value"], datetime.date | datetime.time)
    return path.strip(), read["value"] if whole else text


def _keys(path: Any, value: Any, origin: str) -> Path:
    keys = tuple(path.split(".")) if isinstance(path, str) else ("",)
    if not all(keys):
        raise InputError(f"expected a dotted path, as in training.lr, got {path!r} ({origin})")
    if len(keys) > DEEPEST:
        raise InputError(
            f"expected the path of an option, at most six words, got a path of {len(keys)} words ({origin[:80]})"
        )
    if keys[0] in _SLOT_HEADS:
        # `legato explain --set` and `legato.algorithm` need no "algorithm." in front; here it may be left out too.
        keys = ("algorithm", *keys)
    if keys[0] == "algorithm" and len(keys) > 2:
        # One key, as in a written configuration: a slot and the fields of its part cannot both be nested under one.
        return "algorithm", ".".join(keys[1:])
    # `algorithm=grpo` sets the name and keeps other changes to the algorithm.
    return (*keys, "name") if keys == ("algorithm",) and not isinstance(value, dict) else keys


def _native(value: Any, origin: str, depth: int = 0) -> Any:
    """A Python value converted to the type TOML would produce."""
    if depth > DEEPEST:
        raise InputError(f"{origin} is nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        return {key: _native(inner, origin, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_native(inner, origin, depth + 1) for inner in value]
    if isinstance(value, File):
        return str(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, int | float) else value


def check_tree(tree: Mapping[str, Any], origin: str) -> None:
    """Refuse trees that later messages could not show: too deep, keys that are not text, text that is not Unicode."""
    pending: list[tuple[Any, int]] = [(tree, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > DEEPEST:
            raise InputError(f"{origin} is nested more than {DEEPEST} deep")
        if isinstance(value, Mapping):
            pending.extend((inner, depth + 1) for pair in value.items() for inner in pair)
            for key in value:
                if not isinstance(key, str):
                    raise InputError(f"expected a string as the name of an option, got {key!r} ({origin})")
        elif isinstance(value, list):
            pending.extend((inner, depth + 1) for inner in value)
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise InputError(f"{origin}: {value!r} is not valid Unicode") from None


def unstorable_values(value: Any, path: Path) -> Iterator[tuple[Path, Any, str]]:
    """The values that TOML cannot store or no run can use: (path, value, what is allowed)."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from unstorable_values(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from unstorable_values(inner, path)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, value, "a finite number"
    elif not isinstance(value, _PLAIN):
        yield path, value, "a string, a number, true or false, a list or a table"
