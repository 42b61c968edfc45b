"""Faults that are injected into a healthy run from one step on, for the health watch to detect.

A fault is a context that changes the trainer for one step and restores it. It depends only on the step number, so that a run
that is rolled back meets the fault again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from legato.algorithms.override import override
from legato.core.rollout import Rollout, Score, Unscorable
from legato.rollouts.engine import QueuedEngine
from legato.rollouts.mismatch import Mismatch, MismatchedEngine
from legato.run import wire
from legato.training.step import Trainer
from legato.training.tables import Tables

Fault = Callable[[Trainer], Any]
"""Returns a context in which one step of the trainer is faulty."""


@dataclass(frozen=True, slots=True)
class Named:
    """A fault and its description."""

    make: Callable[[Path], Fault]
    """Builds the fault from the run directory of the healthy run."""
    says: str


@contextmanager
def inject(fault: Fault | None, first: int) -> Iterator[None]:
    """Trainers built inside this context are faulty from step `first + 1` on."""
    trainer_of = wire.trainer_of

    def faulty_trainer(*arguments: Any) -> Trainer:
        trainer = trainer_of(*arguments)
        step = trainer.step

        def faulty_step(*step_arguments: Any) -> Any:
            if fault is None or trainer.steps_done < first:
                return step(*step_arguments)
            with fault(trainer):
                return step(*step_arguments)

        trainer.step = faulty_step  # type: ignore[method-assign]
        return trainer

    with mock.patch.object(wire, "trainer_of", faulty_trainer):
        yield


def raise_learning_rate(factor: float) -> Fault:
    @contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        before = trainer.optimizer.scale
        trainer.optimizer.scale = before * factor
        yield
        trainer.optimizer.scale = before

    return fault


def replace_engine(make: Callable[[Trainer], Any]) -> Fault:
    """A fault that replaces the engine. The new engine is built at the first faulty step and reused."""
    engines: dict[int, Any] = {}

    @contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        own = trainer.source.runner.engine
        trainer.source.runner.engine = engines.setdefault(id(trainer), None) or make(trainer)
        engines[id(trainer)] = trainer.source.runner.engine
        yield
        trainer.source.runner.engine = own

    return fault


def freeze_sampler(run: Path) -> Fault:
    """The sampler keeps the weights that it had when the fault began."""

    def make(trainer: Trainer) -> Any:
        engine = MismatchedEngine(trainer.policy, Mismatch(kind="stale"))
        engine.publish = lambda weights, version: None  # type: ignore[method-assign]
        return engine

    return replace_engine(make)


def reset_sampler(run: Path) -> Fault:
    """The sampler has the weights from before the first step, as if it had never received the trained weights."""

    def make(trainer: Trainer) -> Any:
        engine = MismatchedEngine(trainer.policy, Mismatch(kind="stale"))
        engine.publish = lambda weights, version: None  # type: ignore[method-assign]
        first = load_file(run / "checkpoints" / "step-000000" / "model" / "model.safetensors")
        with torch.no_grad():
            for name, weight in engine._weights.items():
                weight.copy_(first[name])
        return engine

    return replace_engine(make)


class _Altered(QueuedEngine):
    """An engine with another temperature or with shifted log-probs."""

    def __init__(self, engine: Any, *, shift: float = 0.0, temperature: float = 1.0) -> None:
        super().__init__()
        self.engine, self.shift, self.temperature = engine, shift, temperature
        self.name = engine.name

    def respond(self, requests: Any, sampling: Any, limits: Any) -> Any:
        hotter = replace(sampling, temperature=sampling.temperature * self.temperature)
        rows = self.engine.generate(requests, hotter, limits)
        return [[replace(each, logprobs=each.logprobs + self.shift) for each in row] for row in rows]


def change_scores(change: Callable[[Rollout, Score], Score]) -> Fault:
    @contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        own = trainer.source.judge

        def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
            pairs = zip(rollouts, own(rollouts), strict=True)
            return [score if isinstance(score, Unscorable) else change(rollout, score) for rollout, score in pairs]

        trainer.source.judge = judge
        yield
        trainer.source.judge = own

    return fault


def change_algorithm(changes: dict[str, Any]) -> Fault:
    @contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        own = trainer.algorithm
        trainer.algorithm = override(own, changes)
        yield
        trainer.algorithm = own

    return fault


@contextmanager
def punish_entropy(trainer: Trainer) -> Iterator[None]:
    with change_algorithm({"objective.penalties.entropy.coefficient": 0.5})(trainer):
        (bonus,) = (part for part in trainer.algorithm.objective.penalties if part.name == "entropy")
        object.__setattr__(bonus, "coefficient", -0.5)  # a recipe cannot set this value; the part refuses it
        yield


@contextmanager
def flip_advantages(trainer: Trainer) -> Iterator[None]:
    own = Tables.with_advantages

    def negative(tables: Tables, *arguments: Any, **options: Any) -> Tables:
        result = own(tables, *arguments, **options)
        assert result.advantages is not None
        return replace(result, advantages=-result.advantages)

    with mock.patch.object(Tables, "with_advantages", negative):
        yield


class _Repeated:
    """A source that always returns the same problem."""

    def __init__(self, source: Any) -> None:
        self.problem = source.training(0)
        self.size = source.size

    def training(self, number: int) -> Any:
        return self.problem


@contextmanager
def repeat_one_prompt(trainer: Trainer) -> Iterator[None]:
    own = trainer.source.source
    trainer.source.source = _Repeated(own)  # type: ignore[assignment]
    yield
    trainer.source.source = own


def ends_even(rollout: Rollout) -> bool:
    return rollout.text[-1:] in set("02468")


FAULTS: dict[str, Named] = {
    "learning rate x 5": Named(lambda run: raise_learning_rate(5.0), "the learning rate raised fivefold"),
    "learning rate x 100": Named(lambda run: raise_learning_rate(100.0), "the learning rate raised a hundredfold"),
    "stale weights": Named(freeze_sampler, "the sampler keeps the weights of step 50 for ever"),
    "adapter not applied": Named(reset_sampler, "the sampler has the weights from before the first step"),
    "log-prob shift": Named(
        lambda run: replace_engine(lambda t: _Altered(t.source.runner.engine, shift=-0.05)),
        "reported log-probs are 0.05 too low",
    ),
    "temperature mismatch": Named(
        lambda run: replace_engine(lambda t: _Altered(t.source.runner.engine, temperature=1.5)),
        "sampled at temperature 1.5, trained as if at 1",
    ),
    "advantage sign": Named(lambda run: flip_advantages, "advantages with the wrong sign"),
    "clip off": Named(lambda run: change_algorithm({"objective.trust": []}), "no trust region"),
    "reward constant": Named(
        lambda run: change_scores(lambda rollout, score: replace(score, reward=0.5, accuracy=0.5)),
        "every response scores 0.5",
    ),
    "reward inverted": Named(
        lambda run: change_scores(
            lambda rollout, score: replace(score, reward=1 - score.reward, accuracy=1 - score.accuracy)
        ),
        "right answers score 0, wrong ones 1",
    ),
    "phantom shaped reward": Named(
        lambda run: change_scores(lambda rollout, score: replace(score, reward=score.reward + 2.0 * ends_even(rollout))),
        "a bonus of 2 for an answer that ends with an even digit",
    ),
    "length-hack reward": Named(
        lambda run: change_scores(lambda rollout, score: replace(score, reward=len(rollout.tokens) / 6)),
        "the reward is the length of the response",
    ),
    "entropy bonus, wrong sign": Named(lambda run: punish_entropy, "an entropy bonus of -0.5: certainty is paid for"),
    "one prompt": Named(lambda run: repeat_one_prompt, "every group is of the same problem"),
}
