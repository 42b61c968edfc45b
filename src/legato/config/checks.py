"""What options have to agree on. Each check yields messages that name the options, their values and their places."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.override import flatten as flatten_algorithm
from legato.config.kinds import FAMILIES, find
from legato.config.messages import show_value
from legato.config.resolved import flatten
from legato.config.schema import Config
from legato.core.importing import is_import_path
from legato.core.parts import names, nearest
from legato.errors import InputError
from legato.health.actions import HealthSettings
from legato.health.rules import RULES
from legato.health.tighten import clip_bounds
from legato.rollouts.registry import engine_names

_LARGEST_EPSILON = 1e-3
"""Of Adam: a larger one is somebody's clip range, which other trainers call epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration whose options are each in order."""

    config: Config
    algorithm: Algorithm
    origin: Callable[[str], str]

    def says(self, path: str) -> str:
        """An option with its value and its place."""
        return f"{path} = {show_value(flatten(self.config).get(path))} ({self.origin(path)})"


def disagreements(case: Case) -> Iterator[str]:
    """Every message of every check."""
    checks = (_updates, _stages, _epochs, _environment, _reward, _engine, _mismatch, _evaluation, _health, _output)
    for check in (*checks, _algorithm, _turns, _values):
        yield from check(case)


def _updates(case: Case) -> Iterator[str]:
    training = case.config.training
    if training.prompts_per_step < training.updates_per_step:
        yield (
            f"{case.says('training.prompts_per_step')} is below {case.says('training.updates_per_step')};"
            " an update takes whole groups, at least one"
        )
    if training.load_balance and training.update_passes == "one":
        yield (
            f"{case.says('training.load_balance')} takes two passes, the first of which counts the choices of all experts;"
            f" {case.says('training.update_passes')}"
        )
    if training.routing_replay == "R3" and not case.config.rollouts.record_routes:
        yield f"{case.says('training.routing_replay')} needs rollouts.record_routes = true"
    if training.epsilon > _LARGEST_EPSILON:
        yield (
            f"{case.says('training.epsilon')} is Adam's, which is at most {_LARGEST_EPSILON:g}; the clip of the ratio is"
            " algorithm.objective.trust.clip.low and .high"
        )
    if training.schedule == "constant" and training.final_lr_share > 0:
        yield f"{case.says('training.final_lr_share')} has no effect with {case.says('training.schedule')}"


def _stages(case: Case) -> Iterator[str]:
    task = case.config.task
    for path, given in (("task.second", task.second), ("task.second_after_steps", task.second_after_steps)):
        if task.stages == 2 and given is None:
            yield f"{case.says('task.stages')} needs {path}"
        if task.stages == 1 and given is not None:
            yield f"{path} ({case.origin(path)}) has no effect with {case.says('task.stages')}; task.stages = 2 is needed"
    if task.second_after_steps is not None and task.second_after_steps >= case.config.training.steps:
        yield f"{case.says('task.second_after_steps')} is not below {case.says('training.steps')}: there is no second stage"


def _epochs(case: Case) -> Iterator[str]:
    task = case.config.task
    if task.problems_per_epoch is not None and not _made_in_code(task.kind):
        yield (
            f"{case.says('task.problems_per_epoch')} is for tasks made in code; an epoch of {case.says('task.kind')} is"
            " its data"
        )


def _made_in_code(kind: str) -> bool:
    return is_import_path(kind) or kind in names(FAMILIES["task"][0])


def _environment(case: Case) -> Iterator[str]:
    kind = case.config.task.environment
    if kind is not None:
        try:
            find("environment", kind)
        except InputError as error:
            yield f"{case.says('task.environment')}: {error}"
        return
    reward = case.config.reward
    kinds = {"reward.kind": reward.kind} | {
        f"reward.components.{name}.kind": c.kind for name, c in reward.components.items()
    }
    for path in [path for path, named in kinds.items() if named == "environment"]:
        yield f"{case.says(path)} needs task.environment, which gives it; without one there is nothing to sum up"


def _reward(case: Case) -> Iterator[str]:
    components = case.config.reward.components
    if components and not any(component.judges for component in components.values()):
        yield "reward.components: none of them judges the answer (judges = true); accuracy would be unknown"


def _engine(case: Case) -> Iterator[str]:
    name = case.config.rollouts.engine
    if not is_import_path(name) and name not in engine_names():
        known = ", ".join(engine_names())
        yield f"{case.says('rollouts.engine')}: expected {known}, or file.py:Name of your own"


def _mismatch(case: Case) -> Iterator[str]:
    mismatch = case.config.rollouts.mismatch
    for name, kind in (("size", "perturbed"), ("updates", "stale")):
        if getattr(mismatch, name) is not None and mismatch.kind != kind:
            path = f"rollouts.mismatch.{name}"
            yield f"{case.says(path)} has no effect with {case.says('rollouts.mismatch.kind')}; it is for {kind!r}"


def _evaluation(case: Case) -> Iterator[str]:
    evaluation = case.config.evaluation
    if evaluation.target_greedy is not None and not evaluation.greedy:
        yield f"{case.says('evaluation.target_greedy')} needs evaluation.greedy = true"
    for path, target in (("target", evaluation.target), ("target_greedy", evaluation.target_greedy)):
        if target is not None and evaluation.every_steps == 0:
            yield f"{case.says(f'evaluation.{path}')} is never looked at with {case.says('evaluation.every_steps')}"


def _health(case: Case) -> Iterator[str]:
    health = case.config.health
    known = [rule.name for rule in RULES]
    for name in health.ignored:
        if name not in known:
            yield f"{case.says('health.ignored')}: there is no rule {name!r}; {nearest(name, known)}"
    if health.action != "recover":
        for path in ("recoveries", "lr_factor", "clip_factor", "skip_data"):
            if case.origin(f"health.{path}") != "default" and getattr(health, path) != getattr(HealthSettings(), path):
                yield f"{case.says(f'health.{path}')} has no effect with {case.says('health.action')}; 'recover' uses it"
        return
    if not case.config.output.checkpoint_every_steps:
        yield f"{case.says('health.action')} needs checkpoints to go back to; {case.says('output.checkpoint_every_steps')}"
    if health.lr_factor == 1 and health.clip_factor == 1 and not health.skip_data:
        yield (
            f"{case.says('health.action')} with health.lr_factor = 1, health.clip_factor = 1 and health.skip_data = false"
            " changes nothing: the run would repeat what it was rolled back from"
        )
    adapting = [part.name for part in case.algorithm.objective.trust if part.adapts]
    if health.clip_factor != 1 and adapting:
        yield f"{case.says('health.clip_factor')} has no effect on {adapting[0]!r}, whose band goes back to its target"
    elif health.clip_factor != 1 and not clip_bounds(case.algorithm):
        yield f"{case.says('health.clip_factor')} has no effect: {case.algorithm.name} has no clip with bounds to tighten"


def _output(case: Case) -> Iterator[str]:
    name = case.config.output.name
    if name is not None and (name in (".", "..") or any(sign in name for sign in "/\\\0\n")):
        yield f"{case.says('output.name')} is not the name of a folder; / and \\ belong into output.directory"


def _algorithm(case: Case) -> Iterator[str]:
    algorithm, samples = case.algorithm, case.config.rollouts.samples_per_prompt
    draws: Any = getattr(algorithm.advantage, "k", 0)
    if draws > samples:
        yield f"algorithm.advantage.k = {draws} needs groups of at least {draws}; {case.says('rollouts.samples_per_prompt')}"
    if case.config.training.value_lr is not None and all(part.name != "value" for part in algorithm.objective.penalties):
        yield f"{case.says('training.value_lr')} has no effect: {algorithm.name} trains no value head; ppo does"
    for path, value in flatten_algorithm(algorithm).items():
        if value is None and path.startswith("objective.trust.log-clip."):
            yield f"algorithm.{path} must be given: the paper's constant is not verified; 0.05, for instance"


def _turns(case: Case) -> Iterator[str]:
    """Without an environment a rollout is one turn, and whatever compares turns compares nothing."""
    if case.config.task.environment is not None:
        return
    reading = [
        path for path, value in flatten_algorithm(case.algorithm).items() if path.endswith("level") and value == "turn"
    ]
    if {"turn", "turn_states"} & set(case.algorithm.advantage.needs()) and "advantage.level" not in reading:
        reading.append("advantage")
    for path in reading:
        yield (
            f"expected task.environment, got none: {_of_algorithm(case, path)} looks at turns, and without an environment"
            " every rollout is one; name an environment, or take a level or an advantage of whole responses"
        )


def _values(case: Case) -> Iterator[str]:
    """Values that nothing trains stay as they were made."""
    algorithm = case.algorithm
    penalties = [part for part in algorithm.objective.penalties if getattr(part, "coefficient", 1.0) != 0]
    trained = any("values" in part.needs() for part in penalties)
    if "values" in algorithm.advantage.needs() and not trained:
        yield (
            f"expected a penalty that trains the value head, got none: {_of_algorithm(case, 'advantage')} reads its values;"
            ' add algorithm.objective.penalties = ["value"], or take an advantage that reads none (group-z)'
        )


def _of_algorithm(case: Case, path: str) -> str:
    """A path of the algorithm with its value and the place that brought it in."""
    value: Any = case.algorithm
    for word in path.split("."):
        value = getattr(value, word)
    origin = case.origin(f"algorithm.{path}")
    origin = case.origin("algorithm.name") if origin.startswith("algorithm ") else origin
    return f"{case.algorithm.name} with {path} = {show_value(getattr(value, 'name', value))} ({origin})"
