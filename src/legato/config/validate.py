"""Turns a merged tree into a `Config`, or into a list of all its faults."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

from legato.config import kinds
from legato.config.document import allowed_values, field_names, rule_of
from legato.config.locate import Path
from legato.config.messages import refusal
from legato.config.schema import Component, Config, Reward, SecondTask, Task
from legato.config.sources import Layer, unstorable_values
from legato.config.unknown import unknown_option
from legato.core.fields import LARGEST, Rule
from legato.core.parts import nearest
from legato.core.settings import Table
from legato.errors import InputError


def tables_with_kind(tree: Mapping[str, Any]) -> Iterator[tuple[Path, type]]:
    """The tables that hold a kind and its options: (path, section)."""
    yield ("task",), Task
    yield ("reward",), Reward
    yield ("task", "second"), SecondTask
    reward = tree.get("reward")
    components = reward.get("components") if isinstance(reward, dict) else None
    for name in components if isinstance(components, dict) else ():
        yield ("reward", "components", name), Component


def merge(into: Layer, layer: Layer) -> None:
    """Merge a source over the lower ones. A new kind of task or reward drops the options of the old kind."""
    for path, section in tables_with_kind(into.tree):
        below, above = into.at(path), layer.at(path)
        if isinstance(below, dict) and isinstance(above, dict):
            if "kind" in above and above["kind"] != below.get("kind", _default_kind(section)):
                _drop_options(into, path, section)
            if section is Reward and above.get("kind") and not above.get("components"):
                into.drop(("reward", "components"))
            if section is Reward and above.get("components") and not above.get("kind"):
                _drop_options(into, path, section)
                into.drop(("reward", "kind"))
    for name, value in layer.tree.items():
        if name != "algorithm":
            into.put((name,), value, layer.origin)


def _default_kind(section: type) -> str | None:
    default = cast(Any, section).__dataclass_fields__["kind"].default
    return None if default is dataclasses.MISSING else default


def _drop_options(into: Layer, path: Path, section: type) -> None:
    for key in list(into.at(path)):
        if key not in field_names(section):
            into.drop((*path, key))


def validate(layer: Layer, faults: list[str]) -> Config | None:
    """The configuration; None if it has faults, with one line added to `faults` for each."""
    before = len(faults)
    tree = {"task": {}, "reward": {}, **layer.tree}
    if isinstance(tree["reward"], dict):
        tree["reward"] = _reward_table(tree["reward"], layer, faults)
    config: Config | None = _build(Config, tree, (), layer, faults)
    return config if len(faults) == before else None


def _build(section: type, tree: Mapping[str, Any], path: Path, layer: Layer, faults: list[str]) -> Any:
    """The settings object of a table; None if it has faults, with one line added to `faults` for each."""
    before, known = len(faults), field_names(section)
    values = {key: _value(rule_of(section, key), tree[key], (*path, key), layer, faults) for key in known if key in tree}
    others = {key: value for key, value in tree.items() if key not in known}
    if "kind" in known and "options" in cast(Any, section).__dataclass_fields__:
        values["options"] = _options(section, tree.get("kind", _default_kind(section)), others, path, layer, faults)
    else:
        faults.extend(unknown_option((*path, key), layer.origin((*path, key)), known) for key in others)
    for field in dataclasses.fields(cast(Any, section)):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in tree:
            wanted = allowed_values(rule_of(section, field.name))
            faults.append(f"{'.'.join((*path, field.name))}: expected {wanted}, got nothing ({layer.origin(path)})")
    if len(faults) > before:
        return None
    try:
        return section(**values)
    except InputError as error:  # fields that are each allowed contradict each other; the message begins with one of them
        places = dict.fromkeys(layer.origin((*path, key)) for key in tree)
        faults.append(f"{'.'.join(path)}.{error} ({', '.join(places)})")
        return None


def _value(rule: Rule, value: Any, path: Path, layer: Layer, faults: list[str]) -> Any:
    """The checked value of a field. `false` means None if only None is allowed; `true` means a table with its defaults."""
    where = layer.origin(path)
    if value is False and rule.optional and not rule.accepts(False):
        return None
    if isinstance(rule, Table) and rule.section is not None:
        table = {} if value is True and rule.optional else value
        if table is None and rule.optional:
            return None
        if not isinstance(table, dict):
            faults.append(refusal(path, value, where, allowed_values(rule)))
            return None
        if rule.several:
            each = Table("a table", rule.accepts, section=rule.section)
            return {name: _value(each, inner, (*path, name), layer, faults) for name, inner in table.items()}
        return _build(rule.section, table, path, layer, faults)
    if not rule.takes(value):
        too_large = isinstance(value, int) and not isinstance(value, bool) and value > LARGEST
        faults.append(refusal(path, value, where, allowed_values(rule) + (" and below 2**63" if too_large else "")))
        return None
    if isinstance(rule, Table):
        faults.extend(
            refusal(at, each, layer.origin(at), wanted) for at, each, wanted in unstorable_values(dict(value), path)
        )
    return rule.to_stored(value)


def _reward_table(reward: Mapping[str, Any], layer: Layer, faults: list[str]) -> dict[str, Any]:
    """The reward table, checked to have either a kind or components."""
    kind, components = ("reward", "kind"), ("reward", "components")
    if reward.get("components"):
        if reward.get("kind"):
            places = f"{layer.origin(kind)} and {layer.origin(components)}"
            faults.append(f"reward: expected reward.kind or reward.components, got both ({places}); drop one of them")
        return {**reward, "kind": None}
    if "kind" in reward and reward["kind"] in (None, False):
        faults.append(
            f"reward: expected reward.kind or reward.components, got neither ({layer.origin(kind)}); set one of them"
        )
    return dict(reward)


def _options(
    section: type, kind: Any, options: Mapping[str, Any], path: Path, layer: Layer, faults: list[str]
) -> dict[str, Any]:
    """The options of a kind, checked by constructing its part and completed with defaults."""
    if not isinstance(kind, str) or not kind:
        for name in options:
            faults.append(f"{_path_and_origin(layer, (*path, name))} does not exist; {nearest(name, field_names(section))}")
        return {}
    try:
        part = kinds.find(path[0], kind)
    except InputError as error:
        faults.append(f"{_path_and_origin(layer, (*path, 'kind'))}: {error}")
        return {}
    known = options if part is None else kinds.option_names(part)
    for name in [name for name in options if name not in known]:
        words = nearest(name, [*known, *field_names(section)])
        faults.append(f"{_path_and_origin(layer, (*path, name))} is no option of {path[0]} {kind!r}; {words}")
        return {}
    refusals = [] if part is None else list(kinds.refused_options(part, options))
    faults.extend(refusal((*path, name), options[name], layer.origin((*path, name)), wanted) for name, wanted in refusals)
    if refusals:
        return {}
    try:
        full = dict(options) if part is None else kinds.complete_options(part, options)
    except InputError as error:
        faults.append(f"{_path_and_origin(layer, path)}: {error}")
        return {}
    # If a part has a field that the section also has (system_prompt), the section's value wins.
    own = {name: value for name, value in full.items() if name not in field_names(section)}
    for where, value, wanted in unstorable_values({name: value for name, value in own.items() if value is not None}, path):
        faults.append(refusal(where, value, layer.origin(where), wanted))
    return own


def _path_and_origin(layer: Layer, path: Path) -> str:
    return f"{'.'.join(path)} ({layer.origin(path)})"
