"""The target of `eval`, `sample` and `export`: a run directory, a recipe, or a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from legato.config.load import load
from legato.config.resolved import Resolved
from legato.errors import InputError
from legato.health.goback import find_checkpoint
from legato.policy.model.load import means_a_folder
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.run import wire
from legato.tasks.source import Source
from legato.training import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A configuration and its weights."""

    resolved: Resolved
    saved: Path | None
    """The model folder of a checkpoint; None: the weights the configuration names."""
    warnings: tuple[str, ...] = ()
    python_inputs: tuple[str, ...] = ()
    """Names of inputs that were Python objects (model, problems, reward); the configuration does not describe them."""

    def policy(self) -> Policy:
        if "model" in self.python_inputs and self.resolved.config.policy.lora is not None:
            raise InputError("this run trained adapters on a module given in Python; load that module with peft instead")
        return wire.policy_of(self.resolved, wire.Given(), self.saved)

    def prepare(self, say: Callable[[str], None] = lambda text: None) -> tuple[Policy, Source]:
        """The policy as training would start with it, after the warm-up of a recipe, and the source of its problems."""
        if "problems" in self.python_inputs:
            raise InputError(
                "this run was given its problems in Python, and its configuration does not hold them; name a task with"
                " task.kind="
            )
        config = self.resolved.config
        policy, source = self.policy(), wire.source_of(config, wire.Given())
        if self.saved is None and config.policy.warm_up is not None:
            say("the warm-up of the recipe")
            collector = wire.collector_of(config, policy, source, wire.reward_of(config, wire.Given()))
            wire.warm_up(config, policy, wire.warm_up_examples(config, policy, source, collector), lambda step, loss: None)
        return policy, source


def find(name: str, words: Sequence[str] = (), step: int | None = None) -> Target:
    """Find a target by name: a run directory (newest complete checkpoint, or that of `step`), a recipe, or a model."""
    path = Path(name)
    if path.suffix == ".toml":
        return Target(resolved=load([path], words), saved=None)
    if (path / "metrics.jsonl").is_file():
        directory = RunDirectory.open(path)
        resolved = load([directory.config_path], words)
        if step is None:
            folder, warnings = checkpoint.latest(path / "checkpoints")
        else:
            folder, warnings = find_checkpoint(directory, step), []
        return Target(
            resolved=resolved,
            saved=folder / "model",
            warnings=tuple(warnings),
            python_inputs=tuple(directory.python_parts()),
        )
    if means_a_folder(name) and not path.expanduser().exists():
        raise InputError(
            f"expected a run directory, a recipe (.toml) or a model (a folder or a hub name), got {name}: there is no such"
            " folder"
        )
    return Target(resolved=load([], [f"policy.model={name}", *words]), saved=None)
