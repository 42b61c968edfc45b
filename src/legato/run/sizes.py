"""Refuses sizes that no memory can hold, by arithmetic, before a model, a problem or a rollout exists.

`memory.py` estimates a loaded policy more exactly. The numbers here are lower bounds: what they refuse cannot run.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from legato.config.messages import show_value
from legato.config.resolved import Resolved
from legato.core.importing import is_import_path
from legato.core.parts import names
from legato.errors import InputError
from legato.policy.model.load import Loading, choose_device, choose_dtype
from legato.policy.model.tiny import tiny_sizes
from legato.training.anchor import needs_reference
from legato.training.memory import host
from legato.training.memory.available import available
from legato.training.memory.fit import refuse_if_too_large
from legato.training.memory.model import Demand, gigabytes
from legato.training.memory.shape import Shape

_TINY = ("tiny", "tiny-moe")
_OPTIONS_OF_TINY = ("hidden", "layers", "heads", "feed_forward", "experts", "experts_per_token")


def check_sizes(resolved: Resolved, *, own_model: bool = False, own_problems: bool = False) -> None:
    """InputError if a run cannot fit in memory. `own_model`, `own_problems`: these were given in Python, and exist."""
    values = resolved.values
    for items in _host_items(resolved, own_problems=own_problems):
        _check_host(items, values, resolved.provenance)
    if not own_model:
        _check_training(resolved)


def check_weights(resolved: Resolved) -> None:
    """InputError if not even the weights of the configured model fit on its device."""
    model = _describe_model(resolved)
    room = available(choose_device(resolved.config.policy.device))
    if model is not None and room is not None and model.parameters * model.size > room:
        raise InputError(
            f"expected a model that fits in {gigabytes(room)}, got one whose weights need"
            f" {gigabytes(model.parameters * model.size)} (policy.model = {model.name}); take a smaller one"
        )


def check_samples(count: int, option: str) -> None:
    """InputError if so many responses cannot be held at once."""
    room = available(torch.device("cpu"))
    if room is not None and count * host.ROLLOUT > room:
        raise InputError(
            f"expected responses that fit in {gigabytes(room)}, got {count} of them, which need at least"
            f" {gigabytes(count * host.ROLLOUT)} ({option}); take fewer"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Items:
    """Objects of a run that exist at the same time."""

    what: str
    paths: tuple[str, ...]
    """The options whose product is their number."""
    bytes_each: int


def _host_items(resolved: Resolved, *, own_problems: bool) -> Iterator[_Items]:
    config = resolved.config
    rows = ("training.prompts_per_step", "rollouts.samples_per_prompt")
    yield _Items(what="rollouts of a step", paths=rows, bytes_each=host.ROLLOUT)
    yield _Items(what="rows in the plan of a step", paths=("training.epochs_per_step", *rows), bytes_each=host.PLANNED_ROW)
    yield _Items(
        what="updates in the plan of a step",
        paths=("training.epochs_per_step", "training.updates_per_step"),
        bytes_each=host.PLANNED_UPDATE,
    )
    made_in_code = not own_problems and (is_import_path(config.task.kind) or config.task.kind in names("task"))
    # A data set has only so many problems; a task made in code makes as many as it is asked for.
    held_out = ("task.held_out",) if made_in_code else ()
    if held_out:
        yield _Items(what="held-out problems", paths=held_out, bytes_each=host.PROBLEM)
    yield _Items(
        what="responses of an evaluation", paths=(*held_out, "evaluation.samples_per_problem"), bytes_each=host.ROLLOUT
    )
    for name, each in config.evaluation.sets.items():
        counts = [option for option in ("problems", "samples_per_problem") if getattr(each, option) is not None]
        made_by_set = is_import_path(each.task.kind) or each.task.kind in names("task")
        # A data set has fewer problems than `problems` may ask for.
        paths = tuple(f"evaluation.sets.{name}.{each}" for each in counts if made_by_set or each != "problems")
        if paths:
            yield _Items(what=f"responses of the evaluation set {name!r}", paths=paths, bytes_each=host.ROLLOUT)
    if config.task.problems_per_epoch is not None:
        yield _Items(what="problems of an epoch", paths=("task.problems_per_epoch",), bytes_each=host.PLACE)
    if config.policy.warm_up is not None:
        yield _Items(what="examples of a warm-up step", paths=("policy.warm_up.examples_per_step",), bytes_each=host.EXAMPLE)


def _check_host(items: _Items, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    room = available(torch.device("cpu"))
    needed = items.bytes_each * math.prod(values[path] for path in items.paths)
    if room is None or needed <= room:
        return
    options = " x ".join(f"{path} = {show_value(values[path])} ({origins.get(path, 'default')})" for path in items.paths)
    raise InputError(
        f"expected {items.what} that fit in {gigabytes(room)}, got {options}, which need at least {gigabytes(needed)};"
        f" lower {'it' if len(items.paths) == 1 else 'one of them'}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The size of a model that is not loaded yet."""

    name: str
    shape: Shape
    parameters: int
    """A lower bound of the number of its weights."""
    size: int
    """Bytes per weight, once it is loaded."""


def _check_training(resolved: Resolved) -> None:
    """InputError if the smallest update of the configured model does not fit on its device."""
    config, model = resolved.config, _describe_model(resolved)
    device = choose_device(config.policy.device)
    room = available(device)
    if model is None or room is None:
        return
    policy, lora, training = config.policy, config.policy.lora, config.training
    longest = policy.max_prompt_tokens + config.rollouts.max_response_tokens
    on_gpu = device.type == "cuda"
    # Patterns may freeze most weights or leave most layers without adapters; then no trained weight is counted.
    partly = bool(policy.frozen) or (lora is not None and bool(lora.targets))
    demand = Demand(
        shape=model.shape,
        size=model.size,
        tokens_per_pack=longest,
        parameters=model.parameters * (1 + config.rollouts.mismatch.copies if lora is None else 1),
        trained=0 if partly else None if lora is not None else model.parameters,
        adapter_rank=0 if lora is None else lora.rank,
        eight_bit=training.optimizer == "adamw-8bit",
        offload=training.offload_optimizer and on_gpu,
        reference=needs_reference(resolved.algorithm),
    )
    copies = config.rollouts.mismatch.copies if lora is None else 0
    name = f"{model.name} and {copies} copies of it for rollouts.mismatch" if copies else model.name
    refuse_if_too_large(demand, room, longest, name, on_gpu=on_gpu)


def _describe_model(resolved: Resolved) -> _Model | None:
    """The sizes of the configured model, read without loading it; None if they are not known (a hub name)."""
    policy = resolved.config.policy
    size = choose_dtype(policy.dtype, choose_device(policy.device)).itemsize
    if policy.model in _TINY:
        shape = _shape_after_upcycling(
            Shape.from_config(SimpleNamespace(**tiny_sizes(policy.tiny, policy.model == "tiny-moe"))), policy
        )
        changed = [f"policy.tiny.{each}" for each in _OPTIONS_OF_TINY]
        changed += [] if policy.upcycle is None else ["policy.upcycle.experts"]
        set_by_user = [path for path in changed if resolved.provenance.get(path, "default") != "default"]
        words = ", ".join(f"{path} = {resolved.values[path]}" for path in set_by_user)
        name = f"{policy.model} with {words}" if words else policy.model
        return _Model(name=name, shape=shape, parameters=shape.parameters, size=size)
    folder = Path(policy.model).expanduser()
    try:
        contents = json.loads((folder / "config.json").read_text())
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        shape = Shape.from_config(_namespace(contents.get("text_config", contents)))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, ZeroDivisionError):
        return None  # not a folder of a model; loading it says what is wrong
    # At most four bytes a weight are stored: the sizes in config.json alone could count weights that are shared.
    in_file = stored // 4
    room = available(choose_device(policy.device))
    if room is not None and shape.parameters * size > max(room, 100 * stored):
        raise InputError(
            f"expected the weights of the model that config.json describes, {gigabytes(shape.parameters * size)}, got"
            f" {gigabytes(stored)} (policy.model = {policy.model!r}); its config.json belongs to another model"
        )
    upcycled = _shape_after_upcycling(shape, policy)
    return _Model(
        name=repr(policy.model),
        shape=upcycled,
        parameters=in_file + upcycled.parameters - shape.parameters,
        size=size,
    )


def _namespace(values: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{str(name): value for name, value in values.items()})


def _shape_after_upcycling(shape: Shape, policy: Loading) -> Shape:
    """The sizes after upcycling: every layer has experts, each as wide as the dense layer was."""
    if policy.upcycle is None:
        return shape
    return replace(
        shape,
        sparse_layers=shape.layers,
        experts=policy.upcycle.experts,
        experts_per_token=policy.upcycle.experts_per_token,
        expert_intermediate=shape.intermediate,
    )
