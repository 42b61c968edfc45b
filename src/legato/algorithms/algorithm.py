"""An algorithm is a value: everything a paper sets, in named slots."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from legato.advantages.estimator import Estimate, Estimator, Scores
from legato.advantages.filters import Filter, Samples
from legato.algorithms.settings import Settings
from legato.core.counts import Counts
from legato.core.outcome import Outcome
from legato.core.own_parts import call_parts, check_returned, check_returned_type
from legato.core.scope import Scope
from legato.core.signals import Signals
from legato.core.sums import Sums
from legato.errors import InputError
from legato.objectives.counting import count
from legato.objectives.evaluate import evaluate
from legato.objectives.objective import Objective
from legato.objectives.slots import Aggregate, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A frozen algorithm. `legato.algorithm(value, {path: new})` makes a changed copy."""

    name: str
    advantage: Estimator
    objective: Objective
    aggregate: Aggregate
    filters: tuple[Filter, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=Settings)
    """Defaults of a run that belong to the algorithm, by dotted path of the run's configuration."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", Settings(self.settings))

    @property
    def scope(self) -> Scope:
        return self.objective.scope(self.aggregate)

    def count(self, signals: Signals, groups: int | None) -> Counts:
        """The counts of an update or of a part of one."""
        return call_parts(count, self.objective, self.aggregate, signals, groups)

    def evaluate(self, signals: Signals, counts: Counts, state: State | None = None) -> Outcome:
        """Loss and coefficients; `counts` are those of the whole update."""
        return call_parts(evaluate, self.objective, self.aggregate, signals, counts, state)

    def estimate(self, scores: Scores) -> Estimate:
        """The advantages of a whole step."""
        estimate = call_parts(self.advantage.estimate, scores)
        if self.advantage.of_user:
            check_returned_type(self.advantage, "estimate", estimate, Estimate)
            width = 0 if scores.mask is None else scores.mask.tokens.shape[1]
            rows = len(scores.rewards)
            check_returned(self.advantage, "estimate", estimate.advantages, rows, 0, width, required=True)
            check_returned(self.advantage, "estimate (returns)", estimate.returns, rows, width)
        return estimate

    def keep(self, samples: Samples, dtype: torch.dtype) -> Tensor | None:
        """[B]: 1 for the responses that all filters keep, 0 for the others; None without filters."""
        keep = None
        for part in self.filters:
            decision = call_parts(part.keep, samples)
            if part.of_user:
                check_returned(part, "keep", decision, len(samples.group), 0, required=True)
            keep = decision.to(dtype) if keep is None else keep * decision.to(dtype)
        return keep

    def own_parts(self) -> tuple[str, ...]:
        """The parts that are the user's and none of Legato's, as messages name them."""
        parts = (self.advantage, *self.filters, *self.objective.parts(), self.aggregate)
        return tuple(f"{part.kind} '{part.name}'" for part in parts if part.of_user)

    def initial(self) -> State:
        """The first state of the adaptive parts."""
        return self.objective.initial()

    def advance(self, state: State, sums: Sums, *, first: bool | None = None) -> State:
        """The state for the next update, from the sums of a whole update.

        `first`: whether that update was the first on its rollouts. Its ratios are 1, so an adaptive clip ignores them.
        """
        check_state(self.name, state, self.initial())
        adapting = [part.name for part in self.objective.trust if part.adapts]
        if adapting and first is None:
            raise InputError(
                f"trust '{adapting[0]}' does not learn from the first update on some rollouts: call"
                " advance(state, sums, first=True) after that one and first=False after those that follow"
            )
        return call_parts(
            lambda: {
                part.name: part.advance(state[part.name], sums, bool(first))
                for part in self.objective.parts()
                if part.name in state
            }
        )

    def calibrated(self, state: State, *, noise: float) -> State:
        """The state with the noise floor of the ratio: its standard deviation in log r with nothing trained."""
        check_state(self.name, state, self.initial())
        if not 0 <= noise < math.inf:
            raise InputError(f"noise: expected a finite number >= 0, got {noise!r}")
        parts = [part for part in self.objective.parts() if part.name in state]
        return call_parts(lambda: {part.name: part.calibrated(state[part.name], noise) for part in parts})


def check_state(name: str, state: Any, initial: State) -> None:
    """Check that the state has the parts and fields of this algorithm's initial state."""
    if state is None and initial:
        raise InputError(
            f"{name} has parts that adapt ({', '.join(initial)}): pass state=algorithm.initial() at first, then what"
            " algorithm.advance(state, outcome.sums) returns after each update"
        )
    if state is not None and _fields_by_part(state) != _fields_by_part(initial):
        known = ", ".join(initial) or "nothing"
        raise InputError(f"state holds {state!r:.200}, but {name} keeps state of {known}; use algorithm.initial()")


def _fields_by_part(state: Any) -> dict[str, list[str]] | None:
    """The names of a state; None if it is no state: a mapping of parts to mappings."""
    if not isinstance(state, Mapping) or not all(isinstance(fields, Mapping) for fields in state.values()):
        return None
    return {part: sorted(map(str, fields)) for part, fields in state.items()}
