"""Faults to inject into a healthy run from one step on: what the health watch has to notice.

A fault is a context that changes the trainer for one step and puts it back, so that it depends on the number of the step and
on nothing else: a run that is rolled back meets it again.
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
"""A trainer to a context in which one of its steps is faulty."""


@dataclass(frozen=True, slots=True)
class Named:
    """A fault for a table."""

    make: Callable[[Path], Fault]
    """From the directory of the healthy run that it begins in."""
    says: str


@contextmanager
def inject(fault: Fault | None, first: int) -> Iterator[None]:
    """Trainers made inside are faulty from the step after `first` on."""
    made = wire.trainer_of

    def faulty(*arguments: Any) -> Trainer:
        trainer = made(*arguments)
        step = trainer.step

        def stepped(*asked: Any) -> Any:
            if fault is None or trainer.steps_done < first:
                return step(*asked)
            with fault(trainer):
                return step(*asked)

        trainer.step = stepped  # type: ignore[method-assign]
        return trainer

    with mock.patch.object(wire, "trainer_of", faulty):
        yield


def learning_rate(factor: float) -> Fault:
    @contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        before = trainer.optimizer.scale
        trainer.optimizer.scale = before * factor
        yield
        trainer.optimizer.scale = before

    return fault


def _engine(make: Callable[[Trainer], Any]) -> Fault:
    """Another engine, made at the first faulty step and kept."""
    made: dict[int, Any] = {}

    @contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        own = trainer.source.runner.engine
        trainer.source.runner.engine = made.setdefault(id(trainer), None) or make(trainer)
        made[id(trainer)] = trainer.source.runner.engine
        yield
        trainer.source.runner.engine = own

    return fault


def stale(run: Path) -> Fault:
    """The sampler keeps the weights it had when the fault began."""

    def make(trainer: Trainer) -> Any:
        engine = MismatchedEngine(trainer.policy, Mismatch(kind="stale"))
        engine.publish = lambda weights, version: None  # type: ignore[method-assign]
        return engine

    return _engine(make)


def without_adapter(run: Path) -> Fault:
    """The sampler has the weights from before the first step, as if what was trained had never reached it."""

    def make(trainer: Trainer) -> Any:
        engine = MismatchedEngine(trainer.policy, Mismatch(kind="stale"))
        engine.publish = lambda weights, version: None  # type: ignore[method-assign]
        first = load_file(run / "checkpoints" / "step-000000" / "model" / "model.safetensors")
        with torch.no_grad():
            for name, weight in engine._weights.items():
                weight.copy_(first[name])
        return engine

    return _engine(make)


class _Altered(QueuedEngine):
    """An engine whose sampling or whose report differs."""

    def __init__(self, engine: Any, *, shift: float = 0.0, temperature: float = 1.0) -> None:
        super().__init__()
        self.engine, self.shift, self.temperature = engine, shift, temperature
        self.name = engine.name

    def respond(self, requests: Any, sampling: Any, limits: Any) -> Any:
        hotter = replace(sampling, temperature=sampling.temperature * self.temperature)
        rows = self.engine.generate(requests, hotter, limits)
        return [[replace(each, logprobs=each.logprobs + self.shift) for each in row] for row in rows]


def _scores(change: Callable[[Rollout, Score], Score]) -> Fault:
    @contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        own = trainer.source.judge

        def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
            found = zip(rollouts, own(rollouts), strict=True)
            return [score if isinstance(score, Unscorable) else change(rollout, score) for rollout, score in found]

        trainer.source.judge = judge
        yield
        trainer.source.judge = own

    return fault


def _algorithm(changes: dict[str, Any]) -> Fault:
    @contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        own = trainer.algorithm
        trainer.algorithm = override(own, changes)
        yield
        trainer.algorithm = own

    return fault


@contextmanager
def _punished_entropy(trainer: Trainer) -> Iterator[None]:
    with _algorithm({"objective.penalties.entropy.coefficient": 0.5})(trainer):
        (bonus,) = (part for part in trainer.algorithm.objective.penalties if part.name == "entropy")
        object.__setattr__(bonus, "coefficient", -0.5)  # a recipe cannot say this; the part refuses it
        yield


@contextmanager
def _flipped(trainer: Trainer) -> Iterator[None]:
    own = Tables.with_advantages

    def negative(tables: Tables, algorithm: Any) -> Tables:
        found = own(tables, algorithm)
        assert found.advantages is not None
        return replace(found, advantages=-found.advantages)

    with mock.patch.object(Tables, "with_advantages", negative):
        yield


class _Repeated:
    """A source that has one problem."""

    def __init__(self, source: Any) -> None:
        self.problem = source.training(0)
        self.size = source.size

    def training(self, number: int) -> Any:
        return self.problem


@contextmanager
def _one_prompt(trainer: Trainer) -> Iterator[None]:
    own = trainer.source.source
    trainer.source.source = _Repeated(own)  # type: ignore[assignment]
    yield
    trainer.source.source = own


def _even(rollout: Rollout) -> bool:
    return rollout.text[-1:] in set("02468")


FAULTS: dict[str, Named] = {
    "learning rate x 5": Named(lambda run: learning_rate(5.0), "the learning rate raised fivefold"),
    "learning rate x 100": Named(lambda run: learning_rate(100.0), "the learning rate raised a hundredfold"),
    "stale weights": Named(stale, "the sampler keeps the weights of step 50 for ever"),
    "adapter not applied": Named(without_adapter, "the sampler has the weights from before the first step"),
    "log-prob shift": Named(
        lambda run: _engine(lambda t: _Altered(t.source.runner.engine, shift=-0.05)),
        "reported log-probs are 0.05 too low",
    ),
    "temperature mismatch": Named(
        lambda run: _engine(lambda t: _Altered(t.source.runner.engine, temperature=1.5)),
        "sampled at temperature 1.5, trained as if at 1",
    ),
    "advantage sign": Named(lambda run: _flipped, "advantages with the wrong sign"),
    "clip off": Named(lambda run: _algorithm({"objective.trust": []}), "no trust region"),
    "reward constant": Named(
        lambda run: _scores(lambda rollout, score: replace(score, reward=0.5, accuracy=0.5)), "every response scores 0.5"
    ),
    "reward inverted": Named(
        lambda run: _scores(lambda rollout, score: replace(score, reward=1 - score.reward, accuracy=1 - score.accuracy)),
        "right answers score 0, wrong ones 1",
    ),
    "phantom shaped reward": Named(
        lambda run: _scores(lambda rollout, score: replace(score, reward=score.reward + 2.0 * _even(rollout))),
        "a bonus of 2 for an answer that ends with an even digit",
    ),
    "length-hack reward": Named(
        lambda run: _scores(lambda rollout, score: replace(score, reward=len(rollout.tokens) / 6)),
        "the reward is the length of the response",
    ),
    "entropy bonus, wrong sign": Named(lambda run: _punished_entropy, "an entropy bonus of -0.5: certainty is paid for"),
    "one prompt": Named(lambda run: _one_prompt, "every group is of the same problem"),
}
