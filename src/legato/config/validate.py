"""A merged tree becomes a `Config`, or a list of everything that is wrong with it."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from legato.config import kinds
from legato.config.document import allowed, hints, is_mapping, is_optional, table_of
from legato.config.locate import Path
from legato.config.messages import refused
from legato.config.schema import Component, Config, Reward, SecondTask, Task
from legato.config.sources import Layer, not_plain
from legato.core.parts import nearest
from legato.errors import InputError

_ADAPTER = TypeAdapter(Config)

_DEFAULT_KINDS = {Task: "arithmetic", Reward: "number"}

NAMES_OF_TRL = {
    "adam_epsilon": "training.epsilon",
    "beta": "algorithm.objective.penalties.kl.beta",
    "epsilon": "algorithm.objective.trust.clip.low",
    "epsilon_high": "algorithm.objective.trust.clip.high",
    "eval_steps": "evaluation.every_steps",
    "learning_rate": "training.lr",
    "lr_scheduler_type": "training.schedule",
    "max_completion_length": "rollouts.max_response_tokens",
    "max_grad_norm": "training.gradient_clip",
    "max_prompt_length": "policy.max_prompt_tokens",
    "max_steps": "training.steps",
    "model_name_or_path": "policy.model",
    "num_generations": "rollouts.samples_per_prompt",
    "num_iterations": "training.epochs_per_step",
    "output_dir": "output.directory",
    "run_name": "output.name",
    "save_steps": "output.checkpoint_every_steps",
    "save_total_limit": "output.keep_last",
    "warmup_steps": "training.warm_up_updates",
}
"""What those who come from TRL type, and what it is called here."""


def kinded(tree: Mapping[str, Any]) -> Iterator[tuple[Path, type]]:
    """The tables that hold a kind and its options."""
    yield ("task",), Task
    yield ("reward",), Reward
    yield ("task", "second"), SecondTask
    reward = tree.get("reward")
    components = reward.get("components") if isinstance(reward, dict) else None
    for name in components if isinstance(components, dict) else ():
        yield ("reward", "components", name), Component


def merge(into: Layer, layer: Layer) -> None:
    """Lays a source over those below it. Another kind of task or reward brings its own options: the old ones go."""
    for path, section in kinded(into.tree):
        below, above = into.at(path), layer.at(path)
        if isinstance(below, dict) and isinstance(above, dict):
            if "kind" in above and above["kind"] != below.get("kind", _DEFAULT_KINDS.get(section)):
                _drop_options(into, path, section)
            if section is Reward and above.get("kind") and not above.get("components"):
                into.drop(("reward", "components"))
            if section is Reward and above.get("components") and not above.get("kind"):
                _drop_options(into, path, section)
                into.drop(("reward", "kind"))
    for name, value in layer.tree.items():
        if name != "algorithm":
            into.put((name,), value, layer.origin)


def _drop_options(into: Layer, path: Path, section: type) -> None:
    for key in list(into.at(path)):
        if key not in _named_fields(section):
            into.drop((*path, key))


def _named_fields(section: type) -> list[str]:
    """The options of a section that are written under their own names."""
    return [field.name for field in dataclasses.fields(section) if field.name not in ("options", "changes")]


def validate(given: Layer, faults: list[str]) -> Config | None:
    """The configuration; None, with a line for each fault, if it has any."""
    before = len(faults)
    tree = _prepared(Config, {"task": {}, "reward": {}, **given.tree})
    if isinstance(tree.get("reward"), dict):
        _one_reward(tree["reward"], given, faults)
    for path, _ in list(kinded(tree)):
        table = Layer(tree=tree).at(path)
        if isinstance(table, dict):
            _fill_options(path, table, given, faults)
    try:
        config = _ADAPTER.validate_python(tree)
    except ValidationError as error:
        told = {message: None for each in error.errors(include_url=False) for message in _told(each, given)}
        faults.extend(told)
        return None
    for path, value, wanted in not_plain(dict(config.policy.chat_template_kwargs), ("policy", "chat_template_kwargs")):
        faults.append(refused(path, value, given.origin(path), wanted))
    return config if len(faults) == before else None


def _prepared(section: type, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree as the schema has it: options of a kind in `options`; `false` and `true` for tables that may be absent."""
    known, prepared = hints(section), {}
    free: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in _named_fields(section):
            free[key] = value
            continue
        annotation, table = known[key], table_of(known[key])
        if is_optional(annotation) and value is False:
            value = None
        elif is_optional(annotation) and table is not None and value is True:
            value = {}
        if table is not None and isinstance(value, dict):
            inner = value if is_mapping(annotation) else {"": value}
            inner = {name: _prepared(table, each) if isinstance(each, dict) else each for name, each in inner.items()}
            value = inner if is_mapping(annotation) else inner[""]
        prepared[key] = value
    return {**prepared, "options": free} if "options" in known else {**prepared, **free}


def _one_reward(reward: dict[str, Any], given: Layer, faults: list[str]) -> None:
    kind, components = ("reward", "kind"), ("reward", "components")
    if reward.get("components"):
        if reward.get("kind") is not None:
            places = f"{given.origin(kind)} and {given.origin(components)}"
            faults.append(f"reward.kind and reward.components are both given ({places}); one of them is allowed")
        reward["kind"] = None
    elif "kind" in reward and reward["kind"] is None:
        faults.append(f"reward.kind is off ({given.origin(kind)}) and there are no reward.components; one of them is needed")


def _fill_options(path: Path, table: dict[str, Any], given: Layer, faults: list[str]) -> None:
    """Checks the options of a kind by making its part, and completes them with its defaults."""
    section = {("task",): Task, ("reward",): Reward, ("task", "second"): SecondTask}.get(path, Component)
    kind = table.get("kind", _DEFAULT_KINDS.get(section))
    options = table.get("options", {})
    if kind is None or not isinstance(kind, str):
        for name in options:
            faults.append(f"{_at(given, (*path, name))} does not exist; {nearest(name, _named_fields(section))}")
        return
    try:
        part = kinds.find(path[0], kind)
    except InputError as error:
        faults.append(f"{_at(given, (*path, 'kind'))}: {error}")
        return
    known = options if part is None else kinds.option_names(part)
    for name in [name for name in options if name not in known]:
        words = nearest(name, [*known, *_named_fields(section)])
        faults.append(f"{_at(given, (*path, name))} is no option of {path[0]} {kind!r}; {words}")
        return
    try:
        full = options if part is None else kinds.complete(part, options)
        # Where a part has a field of the section's own name (system_prompt), the section speaks.
        table["options"] = {name: value for name, value in full.items() if name not in _named_fields(section)}
    except InputError as error:
        named = next((name for name in options if f"{name} = " in str(error)), None)
        faults.append(f"{_at(given, path if named is None else (*path, named))}: {error}")
        return
    for where, value, wanted in not_plain({k: v for k, v in table["options"].items() if v is not None}, path):
        faults.append(refused(where, value, given.origin(where), wanted))


def _at(given: Layer, path: Path) -> str:
    return f"{'.'.join(path)} ({given.origin(path)})"


def _told(error: Any, given: Layer) -> Iterator[str]:
    """One of pydantic's errors in our words."""
    path, annotation = _place([str(word) for word in error["loc"]])
    where, value = given.origin(path), given.at(path)
    if error["type"] == "unexpected_keyword_argument":
        section = table_of(annotation)
        assert section is not None
        yield f"{_at(given, path)} does not exist; {_nearest_option(path, section)}"
    elif error["type"] == "missing" and len(path) == len(error["loc"]):
        yield f"{'.'.join(path)} must be given ({given.origin(path[:-1])}); {allowed(annotation)} is needed"
    elif error["type"] == "less_than_equal" and isinstance(value, int) and value.bit_length() > 63:
        yield refused(path, value, where, f"{allowed(annotation)} and below 2**63")
    else:
        yield refused(path, value, where, allowed(annotation))


def _place(words: list[str]) -> tuple[Path, Any]:
    """The path of an option and its annotation; an item of a list is told as the list."""
    annotation: Any = Config
    for depth, word in enumerate(words):
        table = table_of(annotation)
        if table is None:
            return tuple(words[:depth]), annotation
        if is_mapping(annotation):
            annotation = get_args(annotation)[1]
        elif word in hints(table):
            annotation = hints(table)[word]
        else:
            return tuple(words[: depth + 1]), table
    return tuple(words), annotation


def _nearest_option(path: Path, section: type) -> str:
    """The nearest sibling; an option of that very name in another section is nearer, and one that TRL calls so."""
    name = path[-1]
    elsewhere = [
        f"{outer.name}.{name}"
        for outer in dataclasses.fields(Config)
        if (table := table_of(hints(Config)[outer.name])) is not None and name in _named_fields(table)
    ]
    if name in NAMES_OF_TRL:
        elsewhere = [NAMES_OF_TRL[name].removeprefix("".join(f"{word}." for word in path[:-1]))]
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}? Known here: {', '.join(_named_fields(section))}"
    return nearest(name, _named_fields(section))
