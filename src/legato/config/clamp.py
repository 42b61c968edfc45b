"""Fits options of a recipe to options given by hand: `training.steps=12` need not be followed by all that depends on it.

Only values of a lower source give way (a recipe, an algorithm, a default). Two values that were both given by hand and
contradict each other are refused (`checks.py`).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.config.messages import show_value
from legato.config.schema import Config
from legato.core.parts import names
from legato.health.actions import HealthSettings


@dataclass(slots=True, kw_only=True)
class Clamped:
    """A configuration whose dependent options have been fitted, and a note for each of them."""

    config: Config
    algorithm: Algorithm
    origin: Callable[[str], str]
    """From a dotted path to the origin of its value."""
    changes: dict[str, str] = field(default_factory=dict)
    """The option by hand that decided, by the path of the fitted option."""
    notes: list[str] = field(default_factory=list)

    def by_hand(self, path: str) -> bool:
        """Whether an option was given on the command line or in Python."""
        return self.origin(path).startswith(("word ", "override "))

    def fit(self, path: str, value: Any, cause: str) -> None:
        """Set the option at `path` because of the option `cause`, if only the latter was given by hand."""
        old, deciding = _value(self.config, path), _value(self.config, cause)
        if not self.by_hand(cause) or self.by_hand(path) or old == value:
            return
        self.config = _replace(self.config, path.split("."), value)
        self.changes[path] = cause
        what = "is dropped" if value is None else f"becomes {show_value(value)}"
        was = "" if dataclasses.is_dataclass(old) or old is None else f" = {show_value(old)}"
        self.notes.append(f"{path}{was} ({self.origin(path)}) {what}: {cause} = {show_value(deciding)}")


def clamp(config: Config, algorithm: Algorithm, origin: Callable[[str], str]) -> Clamped:
    """Fit the options that depend on options given by hand."""
    fitted = Clamped(config=config, algorithm=algorithm, origin=origin)
    for rule in (_updates, _stages, _task, _evaluation, _mismatch, _health, _value_lr):
        rule(fitted)
    return fitted


def _updates(fitted: Clamped) -> None:
    training = fitted.config.training
    if training.updates_per_step > training.prompts_per_step:
        fitted.fit("training.updates_per_step", training.prompts_per_step, "training.prompts_per_step")
    if training.schedule == "constant":
        fitted.fit("training.final_lr_share", 0.0, "training.schedule")


def _stages(fitted: Clamped) -> None:
    task, steps = fitted.config.task, fitted.config.training.steps
    if task.stages == 1:
        fitted.fit("task.second", None, "task.stages")
        fitted.fit("task.second_after_steps", None, "task.stages")
    elif task.second_after_steps is not None and task.second_after_steps >= steps > 1:
        fitted.fit("task.second_after_steps", steps // 2, "training.steps")
    elif task.second_after_steps is not None and steps == 1 and not fitted.by_hand("task.stages"):
        for path, value in (("task.stages", 1), ("task.second", None), ("task.second_after_steps", None)):
            fitted.fit(path, value, "training.steps")


def _task(fitted: Clamped) -> None:
    task = fitted.config.task
    if task.problems_per_epoch is not None and task.kind in names("data"):
        fitted.fit("task.problems_per_epoch", None, "task.kind")


def _evaluation(fitted: Clamped) -> None:
    if fitted.config.evaluation.every_steps == 0:
        fitted.fit("evaluation.target", None, "evaluation.every_steps")
        fitted.fit("evaluation.target_greedy", None, "evaluation.every_steps")
    if not fitted.config.evaluation.greedy:
        fitted.fit("evaluation.target_greedy", None, "evaluation.greedy")


def _mismatch(fitted: Clamped) -> None:
    for name, kind in (("size", "perturbed"), ("updates", "stale")):
        if fitted.config.rollouts.mismatch.kind != kind:
            fitted.fit(f"rollouts.mismatch.{name}", None, "rollouts.mismatch.kind")


def _health(fitted: Clamped) -> None:
    if fitted.config.health.action != "recover":
        for name in ("recoveries", "lr_factor", "clip_factor", "skip_data"):
            fitted.fit(f"health.{name}", getattr(HealthSettings(), name), "health.action")


def _value_lr(fitted: Clamped) -> None:
    if all(part.name != "value" for part in fitted.algorithm.objective.penalties):
        fitted.fit("training.value_lr", None, "algorithm.name")


def _value(section: Any, path: str) -> Any:
    for word in path.split("."):
        section = getattr(section, word)
    return section


def _replace(section: Any, words: list[str], value: Any) -> Any:
    inner = value if len(words) == 1 else _replace(getattr(section, words[0]), words[1:], value)
    return dataclasses.replace(section, **{words[0]: inner})
