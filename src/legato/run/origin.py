"""Prepares the start of training: runs the warm-up, makes the reference policy and hashes what a resumed run will read."""

from pathlib import Path
from typing import Any

from legato.config.resolved import Resolved
from legato.core.world import on_first_rank
from legato.policy.experts.divergence import measure_divergence
from legato.policy.model.reference import Reference
from legato.policy.model.supervised import texts_of
from legato.records.directory import RunDirectory
from legato.records.room import until_room
from legato.run import inputs, wire
from legato.run.warm import warm_up_key, warm_up_once
from legato.run.watcher import Watcher
from legato.tasks.source import Source
from legato.training.checkpoint import save_reference


def prepare(
    resolved: Resolved,
    objects: wire.PythonObjects,
    policy: Any,
    source: Source,
    collector: Any,
    directory: RunDirectory,
    watcher: Watcher,
) -> tuple[Reference | None, dict[str, Any]]:
    """Warm up the policy if configured; the reference policy, None if the algorithm needs none, and hashes of both.

    The hashes are those of the weights that a resumed run reads beside its checkpoint (`run/inputs.py`).
    """
    config, world = resolved.config, collector.world
    if config.policy.warm_up is not None:
        if world.rank == 0:
            _warm_up(resolved, policy, source, collector, directory, watcher)
        for tensor in policy.model.state_dict().values():
            world.broadcast(tensor)
    base = wire.base_fingerprint(policy)
    weights = wire.weights_fingerprint(policy, base)
    precision = str(policy.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    directory.append_metrics(
        {"kind": "origin", "problems": wire.fingerprint(source), "weights": weights, "precision": precision}
    )
    hashes: dict[str, Any] = {}
    reference = wire.reference_of(resolved, policy) if wire.wants_reference(resolved) else None
    # Save references that the configuration cannot rebuild: a warmed-up policy, or a module that is trained in place.
    made_here = config.policy.warm_up is not None or objects.model is not None
    if reference is not None and not wire.teacher_is_reference(config) and config.policy.lora is None and made_here:
        hashes["reference"] = on_first_rank(
            world, lambda: until_room(lambda: save_reference(policy, directory.path / "reference"))
        )
    if inputs.reads_base(resolved, directory):
        hashes["base"] = inputs.base_weights(resolved, objects, policy, base)
    return reference, hashes


def _warm_up(
    resolved: Resolved, policy: Any, source: Any, collector: Any, directory: RunDirectory, watcher: Watcher
) -> None:
    stage = resolved.config.policy.warm_up
    assert stage is not None

    def after(step: int, loss: float) -> None:
        watcher.warm_up(step + 1, stage.steps, loss)
        if (step + 1) % 10 == 0 or step + 1 == stage.steps:
            directory.append_metrics({"kind": "warm-up", "step": step + 1, "loss": loss})

    examples = wire.warm_up_examples(resolved.config, policy, source, collector)

    def record_divergence(when: str) -> None:
        if resolved.config.policy.upcycle is not None:
            text = f"{when} the warm-up {measure_divergence(policy, texts_of(examples(0)))}"
            watcher.message(text)
            directory.append_metrics({"kind": "note", "step": 0, "text": text})

    record_divergence("before")
    if stage.cache is None:
        wire.warm_up(resolved.config, policy, examples, after)
    else:
        key = warm_up_key(wire.weights_fingerprint(policy), wire.fingerprint(source), stage, examples(0), policy.device)
        if warm_up_once(policy, Path(stage.cache), key, lambda: wire.warm_up(resolved.config, policy, examples, after)):
            watcher.message(f"the warm-up is taken from {stage.cache} ({key})")
    record_divergence("after")
