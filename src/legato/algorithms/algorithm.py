"""An algorithm is a value: everything a paper sets, in named slots."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from legato.advantages.estimator import Estimator
from legato.advantages.filters import Filter
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
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of a run that belong to the algorithm, by dotted path of the run's configuration."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

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
        metrics = sums.report()
        return {
            part.name: part.advance(state[part.name], metrics) for part in self.objective.penalties if part.name in state
        }
