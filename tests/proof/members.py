"""The named algorithms in tests: the signals each needs, the units of its advantage, and how it may be split."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import legato
from tests.reference import aggregation
from tests.reference.batch import Batch, Result, Rows
from tests.reference.family import FAMILY, GENERATION_BUDGET, LENGTH_FAIR_BAND


@dataclass(frozen=True, kw_only=True)
class Member:
    """One named algorithm. `units`: the advantages it takes, the finest last. `aggregate`: n_it where c = 1."""

    units: tuple[str, ...]
    aggregate: Callable[[Batch], Rows]
    needs: tuple[str, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    scope: str = "row"
    differentiated: bool = True


WHOLE = ("sequence",)
FINE = ("sequence", "token")
CONSTANT = partial(aggregation.sequence_sum_over_constant, constant=GENERATION_BUDGET)
BAND = {
    "objective.trust.log-clip.log_low": LENGTH_FAIR_BAND[0],
    "objective.trust.log-clip.log_high": LENGTH_FAIR_BAND[1],
}

MEMBERS: dict[str, Member] = {
    "gspo": Member(units=WHOLE, aggregate=aggregation.sequence_mean),
    "gspo-auto": Member(units=WHOLE, aggregate=aggregation.sequence_mean),
    "gspo-token": Member(units=FINE, aggregate=aggregation.sequence_mean, differentiated=False),
    "turn-gspo": Member(units=("sequence", "turn"), aggregate=aggregation.sequence_mean, needs=("turn",)),
    "grpo": Member(units=FINE, aggregate=aggregation.sequence_mean),
    "grpo-baseline": Member(units=FINE, aggregate=aggregation.sequence_mean),
    "dr-grpo": Member(units=FINE, aggregate=CONSTANT, overrides={"aggregate.constant": GENERATION_BUDGET}),
    "dapo": Member(units=FINE, aggregate=aggregation.group_token_mean),
    "cispo": Member(units=FINE, aggregate=aggregation.group_token_mean, differentiated=False),
    "sapo": Member(units=FINE, aggregate=aggregation.sequence_mean),
    "gmpo": Member(units=WHOLE, aggregate=aggregation.sequence_mean),
    "rspo": Member(units=WHOLE, aggregate=aggregation.sequence_mean, needs=("gamma",)),
    "srpo": Member(units=FINE, aggregate=aggregation.token_mean),
    "ppo": Member(units=FINE, aggregate=aggregation.token_mean, needs=("values", "old_values", "returns")),
    "reinforce": Member(units=FINE, aggregate=aggregation.sequence_sum),
    "rloo": Member(units=FINE, aggregate=aggregation.sequence_sum),
    "reinforce++": Member(units=FINE, aggregate=aggregation.token_mean),
    "lite-ppo": Member(units=FINE, aggregate=aggregation.token_mean),
    "luspo": Member(units=WHOLE, aggregate=aggregation.sequence_sum),
    "fspo": Member(units=WHOLE, aggregate=aggregation.sequence_sum, overrides=BAND),
    "gepo": Member(units=WHOLE, aggregate=aggregation.sequence_mean, scope="group"),
    "vespo": Member(units=WHOLE, aggregate=aggregation.token_mean, differentiated=False),
    "minirl": Member(units=FINE, aggregate=aggregation.sequence_sum, needs=("roll",), differentiated=False),
    "dppo": Member(units=FINE, aggregate=aggregation.token_mean, needs=("roll",), differentiated=False),
    "bapo": Member(units=FINE, aggregate=aggregation.token_mean, scope="update"),
    "seq-product": Member(units=WHOLE, aggregate=aggregation.sequence_sum),
}

SPLITTABLE = [name for name, member in MEMBERS.items() if member.scope != "update"]


def build_member(name: str, overrides: dict[str, Any] | None = None) -> Any:
    """The algorithm under a name, with the constants its paper leaves open and the given overrides."""
    return legato.algorithm(name, {**MEMBERS[name].overrides, **(overrides or {})})


def expected(name: str, batch: Batch) -> Result:
    """The result of the reference."""
    return FAMILY[name](batch)
