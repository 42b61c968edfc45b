"""An algorithm is a value: everything a paper sets, in named slots."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from legato.advantages.estimator import Estimator
from legato.advantages.filters import Filter
from legato.algorithms.settings import Settings
from legato.core.counts import Counts
from legato.core.outcome import Outcome
from legato.core.scope import Scope
from legato.core.signals import Signals
from legato.core.sums import Sums
from legato.objectives.counting import count
from legato.objectives.evaluate import evaluate
from legato.objectives.objective import Objective
from legato.objectives.slots import Aggregate, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Frozen; changed only into another value (`legato.algorithm(value, {path: new})`)."""

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
        return count(self.objective, self.aggregate, signals, groups)

    def evaluate(self, signals: Signals, counts: Counts, state: State | None = None) -> Outcome:
        """Loss and coefficients; `counts` are those of the whole update."""
        return evaluate(self.objective, self.aggregate, signals, counts, state)

    def initial(self) -> State:
        """The first state of the adaptive parts."""
        return self.objective.initial()

    def advance(self, state: State, sums: Sums) -> State:
        """The state for the next update, from the sums of a whole one."""
        check_state(self.name, state, self.initial())
        metrics = sums.report()
        return {
            part.name: part.advance(state[part.name], metrics) for part in self.objective.penalties if part.name in state
        }


def check_state(name: str, state: State | None, initial: State) -> None:
    """The state given is one of this algorithm's parts."""
    if state is None and initial:
        raise ValueError(
            f"{name} has parts that adapt ({', '.join(initial)}): pass state=algorithm.initial() at first, then what"
            " algorithm.advance(state, outcome.sums) returns after each update"
        )
    if state is not None and {part: sorted(fields) for part, fields in state.items()} != {
        part: sorted(fields) for part, fields in initial.items()
    }:
        known = ", ".join(initial) or "nothing"
        raise ValueError(f"state holds {state!r}, but {name} keeps state of {known}; use algorithm.initial()")
