"""Turns a merged tree into a `Config`, or into a list of all its faults.

The options come from the declarations, or as plain data from `names.py` (`sections.py`): the messages are the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from legato.config.locate import Path
from legato.config.messages import refusal
from legato.config.sections import Find, Section, allowed_values, section_of
from legato.config.sources import SETS, Layer, unstorable_values
from legato.config.unknown import unknown_options
from legato.core.fields import LARGEST, Rule
from legato.core.settings import Table
from legato.errors import InputError, nearest


def tables_with_kind(root: Section, tree: Mapping[str, Any]) -> Iterator[tuple[Path, Section]]:
    """The tables that hold a kind and its options: (path, section)."""
    yield ("task",), root.table("task")
    yield ("reward",), root.table("reward")
    yield ("task", "second"), root.table("task").table("second")
    reward = tree.get("reward")
    components = reward.get("components") if isinstance(reward, dict) else None
    for name in components if isinstance(components, dict) else ():
        yield ("reward", "components", name), root.table("reward").table("components")
    evaluation = tree.get("evaluation")
    sets = evaluation.get("sets") if isinstance(evaluation, dict) else None
    of_set = root.table("evaluation").table("sets")
    for name in sets if isinstance(sets, dict) else ():
        yield (*SETS, name, "task"), of_set.table("task")
        yield (*SETS, name, "reward"), of_set.table("reward")


def family_of(path: Path) -> str:
    """ "task" or "reward": what the kind in a table names. A set's tables are evaluation.sets.NAME.task and .reward."""
    return path[-1] if path[:2] == SETS else path[0]


def merge(into: Layer, layer: Layer, root: Section) -> None:
    """Merge a source over the lower ones. A new kind of task, reward or environment drops the options of the old one."""
    for path, section in tables_with_kind(root, into.tree):
        below, above = into.at(path), layer.at(path)
        if isinstance(below, dict) and isinstance(above, dict):
            if "kind" in above and above["kind"] != below.get("kind", section.fields["kind"].default):
                _drop_options(into, path, section)
            if "environment" in above and above["environment"] != below.get("environment"):
                into.drop((*path, "environment_options"))
            if path == ("reward",) and above.get("kind") and not above.get("components"):
                into.drop(("reward", "components"))
            if path == ("reward",) and above.get("components") and not above.get("kind"):
                _drop_options(into, path, section)
                into.drop(("reward", "kind"))
    for name, value in layer.tree.items():
        if name != "algorithm":
            into.put((name,), value, layer.origin)


def reward_of_environment(merged: Layer) -> None:
    """Use the rewards of the environment if no other reward is named."""
    reward = {} if merged.at(("reward",)) is None else merged.at(("reward",))
    if merged.at(("task", "environment")) and isinstance(reward, dict) and not {"kind", "components"} & set(reward):
        merged.put(("reward", "kind"), "environment", lambda _: "task.environment")


def _drop_options(into: Layer, path: Path, section: Section) -> None:
    for key in list(into.at(path)):
        if key not in section.names:
            into.drop((*path, key))


def validate(layer: Layer, faults: list[str], root: Section, find: Find) -> Any:
    """What `root` makes of the tree; None if the tree has faults, with one line added to `faults` for each."""
    before = len(faults)
    tree = {"task": {}, "reward": {}, **layer.tree}
    if isinstance(tree["reward"], dict):
        tree["reward"] = _reward_table(tree["reward"], layer, faults)
    config = _build(root, tree, (), layer, faults, find)
    return config if len(faults) == before else None


def _build(section: Section, tree: Mapping[str, Any], path: Path, layer: Layer, faults: list[str], find: Find) -> Any:
    """The settings object of a table; None if it has faults, with one line added to `faults` for each."""
    before, known = len(faults), section.names
    values = {key: _value(section.rule(key), tree[key], (*path, key), layer, faults, find) for key in known if key in tree}
    others = {key: value for key, value in tree.items() if key not in known}
    if section.has_options:
        kind = tree.get("kind", section.fields["kind"].default)
        values["options"] = _options(section, kind, others, path, layer, faults, find)
    else:
        for key, value in others.items():
            faults.extend(unknown_options((*path, key), value, layer, known))
    for name, declared in section.fields.items():
        if declared.needed and name not in tree:
            wanted = allowed_values(section.rule(name))
            faults.append(f"{'.'.join((*path, name))}: expected {wanted}, got nothing ({layer.origin(path)})")
    if len(faults) > before:
        return None
    try:
        return section.make(**values)
    except InputError as error:  # fields that are each allowed contradict each other; the message begins with one of them
        places = dict.fromkeys(layer.origin((*path, key)) for key in tree)
        faults.append(f"{'.'.join(path)}.{error} ({', '.join(places)})")
        return None


def _value(rule: Rule, value: Any, path: Path, layer: Layer, faults: list[str], find: Find) -> Any:
    """The checked value of a field. `false` means None if only None is allowed; `true` means a table with its defaults."""
    where = layer.origin(path)
    if value is False and rule.optional and not rule.accepts(False):
        return None
    if path == SETS and value is False:
        return {}
    if isinstance(rule, Table) and rule.section is not None:
        table = {} if value is True and rule.optional else value
        if table is None and rule.optional:
            return None
        if not isinstance(table, dict):
            faults.append(refusal(path, value, where, allowed_values(rule)))
            return None
        if rule.several:
            each = Table("a table", rule.accepts, section=rule.section)
            kept = {name: inner for name, inner in table.items() if path != SETS or inner is not False}
            return {name: _value(each, inner, (*path, name), layer, faults, find) for name, inner in kept.items()}
        return _build(section_of(rule.section), table, path, layer, faults, find)
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
    section: Section, kind: Any, options: Mapping[str, Any], path: Path, layer: Layer, faults: list[str], find: Find
) -> dict[str, Any]:
    """The options of a kind, checked by constructing its part and completed with defaults."""
    if not isinstance(kind, str) or not kind:
        for name in options:
            faults.append(f"{_path_and_origin(layer, (*path, name))} does not exist; {nearest(name, section.names)}")
        return {}
    family = family_of(path)
    try:
        part = find(family, kind)
    except InputError as error:
        faults.append(f"{_path_and_origin(layer, (*path, 'kind'))}: {error}")
        return {}
    if part is not None and path[:2] == SETS:
        options = {**part.usual, **options}
    known = options if part is None else list(part.fields)
    for name in [name for name in options if name not in known]:
        words = nearest(name, dict.fromkeys([*known, *section.names]))
        faults.append(f"{_path_and_origin(layer, (*path, name))} is no option of {family} {kind!r}; {words}")
        return {}
    refusals = [] if part is None else list(part.refused(options))
    faults.extend(refusal((*path, name), options[name], layer.origin((*path, name)), wanted) for name, wanted in refusals)
    if refusals:
        return {}
    try:
        full = dict(options) if part is None else part.make(**options)
    except InputError as error:
        faults.append(f"{_path_and_origin(layer, path)}: {error}")
        return {}
    # If a part has a field that the section also has (system_prompt), the section's value wins.
    own = {name: value for name, value in full.items() if name not in section.names}
    for where, value, wanted in unstorable_values({name: value for name, value in own.items() if value is not None}, path):
        faults.append(refusal(where, value, layer.origin(where), wanted))
    return own


def _path_and_origin(layer: Layer, path: Path) -> str:
    return f"{'.'.join(path)} ({layer.origin(path)})"
