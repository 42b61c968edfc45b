"""The target of `eval`, `sample`, `mismatch` and `export`: a run directory, a recipe, or a model."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.config.load import load
from legato.config.resolved import Resolved
from legato.core.importing import search_beside
from legato.errors import InputError
from legato.health.goback import find_checkpoint
from legato.policy.model.load import load_without_weights
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.run import inputs, wire
from legato.run.missing import check_target
from legato.tasks.source import Source
from legato.training import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A configuration and its weights."""

    resolved: Resolved
    saved: Path | None
    """The model folder of a checkpoint; None: the weights the configuration names."""
    warnings: tuple[str, ...] = ()
    """A warning for each newer checkpoint that is damaged: `saved` is older than it should be."""
    python_inputs: tuple[str, ...] = ()
    """Names of inputs that were Python objects (model, problems, reward); the configuration does not describe them."""
    config_file: Path | None = None
    """The config.toml of a run."""
    base: Mapping[str, Any] | None = None
    """Hashes of the model that a run's adapters belong to (`run/inputs.py`)."""

    date: str | None = None
    """The day that the run's chat template writes into prompts; None: today, or the template does not ask."""

    def policy(self) -> Policy:
        if "model" in self.python_inputs and self.resolved.config.policy.lora is not None:
            raise InputError("this run trained adapters on a module given in Python; load that module with peft instead")
        policy = wire.policy_of(self.resolved, wire.PythonObjects(), self.saved)
        self._check_base(policy)
        return policy

    def policy_without_weights(self) -> Policy:
        """The policy for sampling at a server: its tokenizer and sizes."""
        if "model" in self.python_inputs and self.saved is None:
            raise InputError("this run was given its model in Python, which its configuration does not hold")
        config = self.resolved.config
        return load_without_weights(config.policy.model, config.policy, seed=config.training.seed, saved=self.saved)

    def _check_base(self, policy: Policy) -> None:
        """InputError if adapters would be put on other weights than they were trained with."""
        if self.base is None or self.saved is None or self.resolved.config.policy.lora is None:
            return
        with checkpoint.explain_contents(self.saved.parent):
            now = inputs.base_weights(self.resolved, wire.PythonObjects(), policy)
            inputs.check_base(self.base, now, policy.name, allowed=False)

    def prepare(self, say: Callable[[str], None] = lambda text: None) -> tuple[Policy, Source]:
        """The policy as training would start with it, after the warm-up of a recipe, and the source of its problems."""
        if "problems" in self.python_inputs:
            raise InputError(
                "this run was given its problems in Python, and its configuration does not hold them; name a task with"
                " task.kind="
            )
        config = self.resolved.config
        policy, source = self.policy(), wire.source_of(config, wire.PythonObjects())
        if self.saved is None and config.policy.warm_up is not None:
            say("the warm-up of the recipe")
            collector = wire.collector_of(config, policy, source, wire.reward_of(config, wire.PythonObjects()))
            wire.warm_up(config, policy, wire.warm_up_examples(config, policy, source, collector), lambda step, loss: None)
        return policy, source


def warn(text: str) -> None:
    """Print a warning on stderr."""
    print(text, file=sys.stderr)


def find(
    name: str,
    words: Sequence[str] = (),
    step: int | None = None,
    *,
    say: Callable[[str], None] = warn,
    sets: str | None = None,
) -> Target:
    """Find a target by name: a run directory (newest complete checkpoint, or that of `step`), a recipe, or a model.

    `sets` are evaluation sets in place of the target's own: a recipe whose options are read after those of the target, or
    the names of tasks with commas between. `say` gets a warning for each newer checkpoint that is damaged. It prints unless
    told otherwise, so that no verb can forget to warn.
    """
    path = Path(name)
    if sets is not None:
        return _with_sets(find(name, _without_sets(words), step, say=say), name, words, sets)
    if path.suffix == ".toml":
        return Target(resolved=load([path], words), saved=None)
    if (path / "metrics.jsonl").is_file() or RunDirectory(path).checkpoint_steps():
        target = _find_in_run(RunDirectory.open_to_mend(path), words, step)
        for warning in target.warnings:
            say(warning)
        return target
    check_target(name)
    return Target(resolved=load([], [f"policy.model={name}", *words]), saved=None)


def _without_sets(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("evaluation.sets")]


def _with_sets(target: Target, name: str, words: Sequence[str], sets: str) -> Target:
    """The target with other evaluation sets, and with the other options of the recipe that names them."""
    recipe = [Path(sets)] if sets.endswith(".toml") else []
    chosen = [] if recipe else [f"evaluation.sets={json.dumps([each.strip() for each in sets.split(',')])}"]
    # On its own, so that a set of the target with the same name does not mix with it.
    alone = load(recipe, [*chosen, *(word for word in words if word.startswith("evaluation."))]).config.evaluation.sets
    if not alone:
        raise InputError(f"expected a recipe with [[evaluation.sets]] or names of tasks, got {sets!r} (--sets)")
    resolved = target.resolved
    if recipe:
        resolved = _resolve_with_recipe(target, name, recipe, _without_sets(words))
    evaluation = dataclasses.replace(resolved.config.evaluation, sets=alone)
    config = dataclasses.replace(resolved.config, evaluation=evaluation)
    return dataclasses.replace(target, resolved=dataclasses.replace(resolved, config=config))


def _resolve_with_recipe(target: Target, name: str, recipe: Sequence[Path], words: Sequence[str]) -> Resolved:
    """The configuration of a target with a recipe over it."""
    path = Path(name)
    if path.suffix == ".toml":
        return load([path, *recipe], words)
    if target.config_file is not None:
        return load([target.config_file, *recipe], words)
    return load(recipe, [f"policy.model={name}", *words])


def _find_in_run(directory: RunDirectory, words: Sequence[str], step: int | None) -> Target:
    if step is None:
        folder, warnings = checkpoint.latest(directory.path / "checkpoints")
    else:
        folder, warnings = find_checkpoint(directory, step), []
    state = checkpoint.read_state(folder)
    with checkpoint.explain_contents(folder):
        made_of = dict(state["made_of"])
        python_inputs = tuple(str(name) for name in made_of["given"])
    search_beside(directory.code())
    config = directory.config_path if directory.config_path.is_file() else folder / "config.toml"
    return Target(
        resolved=load([config], words),
        saved=folder / "model",
        warnings=tuple(warnings),
        python_inputs=python_inputs,
        config_file=config,
        base=made_of.get("base"),
        date=made_of.get("date"),
    )
