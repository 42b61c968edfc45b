"""Checks that need several options at once. Each yields messages with the options, their values and their origins."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.override import flatten as flatten_algorithm
from legato.config.kinds import find, usual_evaluation
from legato.config.messages import show_value
from legato.config.resolved import flatten
from legato.config.schema import Config, Evaluation, EvaluationSet
from legato.config.sections import FAMILIES
from legato.core.importing import is_import_path
from legato.core.parts import names, nearest
from legato.errors import InputError
from legato.health.actions import HealthSettings
from legato.health.rules import RULES
from legato.health.tighten import clip_bounds
from legato.rollouts.registry import engine_names, is_remote
from legato.rollouts.servers.http import read_address
from legato.training.evaluate import measure_names

_LARGEST_EPSILON = 1e-3
"""Largest epsilon of Adam. A larger value is probably meant as a clip range, which other trainers call epsilon."""


_LARGEST_FLOAT32 = 3.4e38
_SERVER_ADVICE = "drop it, or sample at servers with rollouts.engine = 'vllm', 'sglang' or 'legato'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration in which each single option is valid."""

    config: Config
    algorithm: Algorithm
    origin: Callable[[str], str]
    """From a dotted path to the origin of its value."""

    def describe(self, path: str) -> str:
        """`path = value (origin)`."""
        return f"{path} = {self._value(path)} ({self.origin(path)})"

    def refuse(self, path: str, expected: str, advice: str) -> str:
        """`path: expected ..., got value (origin); advice`."""
        return f"{path}: expected {expected}, got {self._value(path)} ({self.origin(path)}); {advice}"

    def _value(self, path: str) -> str:
        return show_value(flatten(self.config).get(path))


def disagreements(case: Case) -> Iterator[str]:
    """The messages of all checks."""
    checks = (
        _updates,
        _stages,
        _epochs,
        _environment,
        _reward,
        _engine,
        _ahead,
        _mismatch,
        _evaluation,
        _sets,
        _health,
        _output,
    )
    for check in (*checks, _algorithm, _turns, _levels, _teacher, _values, _float32):
        yield from check(case)


def _updates(case: Case) -> Iterator[str]:
    training = case.config.training
    if training.prompts_per_step < training.updates_per_step:
        yield case.refuse(
            "training.prompts_per_step",
            f"at least {case.describe('training.updates_per_step')}",
            "each update takes one whole group or more: raise the first or lower the second",
        )
    if training.load_balance and training.update_passes == "one":
        yield case.refuse(
            "training.update_passes",
            "'auto' or 'two'",
            f"{case.describe('training.load_balance')} takes two passes: the first counts the choices of all experts",
        )
    if training.routing_replay == "R3" and not case.config.rollouts.record_routes:
        yield case.refuse(
            "rollouts.record_routes",
            "true or 'auto'",
            f"{case.describe('training.routing_replay')} needs rollouts.record_routes = true",
        )
    if training.epsilon > _LARGEST_EPSILON:
        yield case.refuse(
            "training.epsilon",
            f"at most {_LARGEST_EPSILON:g}",
            "this is the epsilon of Adam; to clip the ratio set algorithm.objective.trust.clip.low and .high",
        )
    if training.lr * training.weight_decay >= 1:
        yield case.refuse(
            "training.weight_decay",
            f"less than 1 / {case.describe('training.lr')}",
            "AdamW multiplies every matrix by 1 - lr x weight_decay in each update, which would be 0 or negative",
        )
    if training.schedule == "constant" and training.final_lr_share > 0:
        yield case.refuse(
            "training.final_lr_share",
            f"0 with {case.describe('training.schedule')}",
            "a constant schedule never reaches it: drop it or choose another schedule",
        )


def _stages(case: Case) -> Iterator[str]:
    task = case.config.task
    for path, option in (("task.second", task.second), ("task.second_after_steps", task.second_after_steps)):
        if task.stages == 2 and option is None:
            yield f"{path}: expected a value with {case.describe('task.stages')}, got none; set it, or task.stages = 1"
        if task.stages == 1 and option is not None:
            yield (
                f"{path}: expected no value with {case.describe('task.stages')}, got one ({case.origin(path)});"
                " drop it, or set task.stages = 2"
            )
    if task.second_after_steps is not None and task.second_after_steps >= case.config.training.steps:
        yield case.refuse(
            "task.second_after_steps",
            f"less than {case.describe('training.steps')}",
            "the run would end before its second stage",
        )


def _epochs(case: Case) -> Iterator[str]:
    task = case.config.task
    if task.problems_per_epoch is not None and not _made_in_code(task.kind):
        yield case.refuse(
            "task.problems_per_epoch",
            f"no value with {case.describe('task.kind')}",
            "an epoch of a data set is the whole data set; only tasks made in code need a size: drop it",
        )


def _made_in_code(kind: str) -> bool:
    return is_import_path(kind) or kind in names(FAMILIES["task"][0])


def _environment(case: Case) -> Iterator[str]:
    kind = case.config.task.environment
    if kind is not None:
        try:
            find("environment", kind)
        except InputError as error:
            yield f"{case.describe('task.environment')}: {error}"
        return
    reward = case.config.reward
    kinds = {"reward.kind": reward.kind} | {
        f"reward.components.{name}.kind": c.kind for name, c in reward.components.items()
    }
    for path in [path for path, name in kinds.items() if name == "environment"]:
        yield (
            f"task.environment: expected an environment, got none; {case.describe(path)} sums the rewards of its turns:"
            " name an environment or another reward"
        )


def _reward(case: Case) -> Iterator[str]:
    components = case.config.reward.components
    if components and not any(component.judges for component in components.values()):
        yield (
            f"reward.components: expected one with judges = true, got none ({case.origin('reward.components')});"
            " accuracy comes from the components that judge the answer"
        )


def _engine(case: Case) -> Iterator[str]:
    name, servers = case.config.rollouts.engine, case.config.rollouts.servers
    if is_import_path(name) or name not in engine_names() or not is_remote(name):
        for path, value in (("rollouts.servers.urls", servers.urls), ("rollouts.servers.start", servers.start)):
            if value and not is_import_path(name):
                yield case.refuse(path, "none with " + case.describe("rollouts.engine"), _SERVER_ADVICE)
    elif bool(servers.urls) == bool(servers.start):
        got = "both" if servers.start else "neither"
        yield (
            f"rollouts.servers: expected urls or start with {case.describe('rollouts.engine')}, got {got};"
            " give the addresses of servers, or how many to start"
        )
    elif servers.quorum > max(len(servers.urls), servers.start):
        yield case.refuse(
            "rollouts.servers.quorum", f"at most {max(len(servers.urls), servers.start)}, the number of servers", "lower it"
        )
    if len(set(servers.urls)) < len(servers.urls):
        yield case.refuse("rollouts.servers.urls", "different addresses", "name each server once")
    for url in servers.urls:
        try:
            read_address(url)
        except InputError as error:
            yield f"{case.describe('rollouts.servers.urls')}: {error}"
    if not is_import_path(name) and name not in engine_names():
        yield case.refuse("rollouts.engine", ", ".join(engine_names()), "an engine of your own is written file.py:Name")


def _ahead(case: Case) -> Iterator[str]:
    """Refuse the sampler's log-probs as the anchor of responses that older weights have sampled."""
    if case.config.rollouts.ahead and case.config.training.anchor == "sampler":
        yield case.refuse(
            "training.anchor",
            "'auto' or 'recompute'",
            f"{case.describe('rollouts.ahead')} trains on responses of older weights, so the sampler's log-probs are not"
            " those of the policy before the update; drop one of the two",
        )


def _mismatch(case: Case) -> Iterator[str]:
    mismatch = case.config.rollouts.mismatch
    for name, kind in (("size", "perturbed"), ("updates", "stale")):
        if getattr(mismatch, name) is not None and mismatch.kind != kind:
            yield case.refuse(
                f"rollouts.mismatch.{name}",
                f"no value with {case.describe('rollouts.mismatch.kind')}",
                f"only rollouts.mismatch.kind = {kind!r} reads it: drop it or change the kind",
            )


def _evaluation(case: Case) -> Iterator[str]:
    evaluation = case.config.evaluation
    if evaluation.target_greedy is not None and not evaluation.greedy:
        yield case.refuse(
            "evaluation.greedy", "true", f"{case.describe('evaluation.target_greedy')} needs evaluation.greedy = true"
        )
    for path, target in (("target", evaluation.target), ("target_greedy", evaluation.target_greedy)):
        if target is not None and evaluation.every_steps == 0:
            yield case.refuse(
                "evaluation.every_steps",
                "at least 1",
                f"{case.describe(f'evaluation.{path}')} can only be reached by evaluations during the run",
            )


def _sets(case: Case) -> Iterator[str]:
    """Refuse a best checkpoint by a metric that no evaluation of the run measures."""
    evaluation = case.config.evaluation
    ways = ["sampled", *(["greedy"] if evaluation.greedy else [])]
    measured = [f"eval/{what}_{way}" for what in ("accuracy", "reward") for way in ways]
    for name, each in evaluation.sets.items():
        measured += [f"eval/{name}/{measure}" for measure in measure_names(samples_of_set(each, evaluation))]
    if evaluation.best_metric not in measured:
        yield case.refuse(
            "evaluation.best_metric", "a metric of an evaluation of this run", nearest(evaluation.best_metric, measured)
        )


def samples_of_set(each: EvaluationSet, evaluation: Evaluation) -> int:
    """Responses for each problem of a set: as configured, else as usual for a published set."""
    usual = usual_evaluation(each.task.kind)
    return each.samples_per_problem or (evaluation.samples_per_problem if usual is None else usual.samples)


def _health(case: Case) -> Iterator[str]:
    health = case.config.health
    known = [rule.name for rule in RULES]
    for name in health.ignored:
        if name not in known:
            yield case.refuse("health.ignored", "names of rules", f"there is no rule {name!r}: {nearest(name, known)}")
    if health.action != "recover":
        for path in ("recoveries", "lr_factor", "clip_factor", "skip_data"):
            if case.origin(f"health.{path}") != "default" and getattr(health, path) != getattr(HealthSettings(), path):
                yield case.refuse(
                    f"health.{path}",
                    f"the default with {case.describe('health.action')}",
                    "only health.action = 'recover' reads it: drop it or change the action",
                )
        return
    if not case.config.output.checkpoint_every_steps:
        yield case.refuse(
            "output.checkpoint_every_steps",
            "at least 1",
            f"{case.describe('health.action')} needs checkpoints to go back to",
        )
    if health.lr_factor == 1 and health.clip_factor == 1 and not health.skip_data:
        yield (
            "health: expected lr_factor or clip_factor below 1, or skip_data = true, got lr_factor = 1, clip_factor = 1 and"
            f" skip_data = false; {case.describe('health.action')} would repeat the steps that it rolled back"
        )
    adapting = [part.name for part in case.algorithm.objective.trust if part.adapts]
    if health.clip_factor != 1 and adapting:
        yield case.refuse(
            "health.clip_factor", "1", f"it has no effect on {adapting[0]!r}, whose band returns to its target"
        )
    elif health.clip_factor != 1 and not clip_bounds(case.algorithm):
        band = next(iter(case.algorithm.objective.bounds()), None)
        without = f"{case.algorithm.name} has no clip with bounds to tighten"
        unnamed = f"the band of {band!r} cannot be tightened: its bounds name no fields, Bounds(fields=...)"
        yield case.refuse("health.clip_factor", "1", without if band is None else unnamed)


def _output(case: Case) -> Iterator[str]:
    name = case.config.output.name
    if name is not None and (name in (".", "..") or any(sign in name for sign in "/\\\0\n")):
        yield case.refuse("output.name", "the name of a folder", "a path with / or \\ belongs in output.directory")


def _algorithm(case: Case) -> Iterator[str]:
    algorithm, samples = case.algorithm, case.config.rollouts.samples_per_prompt
    draws: Any = getattr(algorithm.advantage, "k", 0)
    if draws > samples:
        yield case.refuse(
            "rollouts.samples_per_prompt",
            f"at least {draws}",
            f"algorithm.advantage.k = {draws} needs groups of at least {draws}",
        )
    if case.config.training.value_lr is not None and all(part.name != "value" for part in algorithm.objective.penalties):
        yield case.refuse(
            "training.value_lr",
            "no value",
            f"{algorithm.name} trains no value head (ppo does): drop it or change the algorithm",
        )
    for path, value in flatten_algorithm(algorithm).items():
        if value is None and path.startswith("objective.trust.log-clip."):
            yield (
                f"algorithm.{path}: expected a number, got none; the paper's constant is not verified, so it must be given:"
                " 0.05, for instance"
            )


def _turns(case: Case) -> Iterator[str]:
    """Refuse parts that compare turns if there is neither an environment nor steps: every rollout would be a single turn."""
    task = case.config.task
    if task.environment is not None and task.step_separator is not None:
        yield (
            f"{case.describe('task.step_separator')}: expected no environment beside it, whose turns are the steps: drop one"
            " of the two"
        )
    if task.environment is not None or task.step_separator is not None:
        return
    reading = [
        path for path, value in flatten_algorithm(case.algorithm).items() if path.endswith("level") and value == "turn"
    ]
    if {"turn", "turn_states"} & set(case.algorithm.advantage.needs()) and "advantage.level" not in reading:
        reading.append("advantage")
    for path in reading:
        yield (
            f"expected task.environment, got none: {_describe_part(case, path)} reads turns, and without an environment"
            " every rollout is one turn; name an environment, divide responses with task.step_separator, or take a level or"
            " an advantage of whole responses"
        )


def _levels(case: Case) -> Iterator[str]:
    """Refuse advantages by turn beside a ratio that gives all tokens of a response one gradient: they would be averaged."""
    ratio, advantage = case.algorithm.objective.ratio, case.algorithm.advantage
    by_turn = "turn" in advantage.needs()
    if by_turn and ratio.gradient == "through" and ratio.level == "sequence":
        yield (
            f"expected one advantage for each response, got {_describe_part(case, 'advantage')}, which has one for each"
            " turn; use gspo-token for advantages per token, or turn-gspo for advantages per turn"
        )


def _teacher(case: Case) -> Iterator[str]:
    teacher, algorithm = case.config.teacher, case.algorithm
    if teacher.model is None:
        return
    ratio = algorithm.objective.ratio
    if teacher.use == "advantage" and ratio.gradient == "through" and ratio.level != "token":
        yield case.refuse(
            "teacher.use",
            f"'penalty' beside {algorithm.name}, which has one advantage for each {ratio.level}",
            "or take gspo-token, grpo or another algorithm with advantages per token",
        )
    if teacher.use == "penalty" and "ref_logprobs" not in needs_of(algorithm):
        yield case.refuse(
            "teacher.use",
            f"'advantage' beside {algorithm.name}, which has no KL penalty",
            'or add one: algorithm.objective.penalties = ["kl-ratio-weighted"]',
        )


def needs_of(algorithm: Algorithm) -> set[str]:
    """Every signal that the algorithm reads."""
    read = {signal for signals in algorithm.objective.needs().values() for signal in signals}
    return read | set(algorithm.advantage.needs())


def _values(case: Case) -> Iterator[str]:
    """Refuse an advantage that reads values if no penalty trains the value head."""
    algorithm = case.algorithm
    penalties = [part for part in algorithm.objective.penalties if getattr(part, "coefficient", 1.0) != 0]
    trained = any("values" in part.needs() for part in penalties)
    if "values" in algorithm.advantage.needs() and not trained:
        yield (
            f"expected a penalty that trains the value head, got none: {_describe_part(case, 'advantage')} reads its values;"
            ' add algorithm.objective.penalties = ["value"], or take an advantage that reads none (group-z)'
        )


def _float32(case: Case) -> Iterator[str]:
    """Refuse numbers that become infinite, or an error of torch, where they meet a float32 tensor."""
    of_algorithm = {f"algorithm.{path}": value for path, value in flatten_algorithm(case.algorithm).items()}
    for path, value in {**flatten(case.config), **of_algorithm}.items():
        if isinstance(value, float) and math.isfinite(value) and abs(value) > _LARGEST_FLOAT32:
            yield (
                f"{path}: expected a number that float32 holds, at most {_LARGEST_FLOAT32:.2g}, got {show_value(value)}"
                f" ({case.origin(path)}); take a smaller one"
            )


def _describe_part(case: Case, path: str) -> str:
    """`algorithm with path = value (origin)`."""
    value: Any = case.algorithm
    for word in path.split("."):
        value = getattr(value, word)
    origin = case.origin(f"algorithm.{path}")
    origin = case.origin("algorithm.name") if origin.startswith("algorithm ") else origin
    return f"{case.algorithm.name} with {path} = {show_value(getattr(value, 'name', value))} ({origin})"
