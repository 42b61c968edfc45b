"""The counts of an update or a part of it, by which the weights of the loss are divided."""

import torch
from torch import Tensor

from legato.core.counts import Counts, Tally
from legato.core.segments import ordered_sum
from legato.core.shapes import Spread
from legato.core.signals import Signals
from legato.objectives.corrections import multiply
from legato.objectives.objective import Objective
from legato.objectives.slots import Aggregate, Context


def tally(signals: Signals, keep: Spread | None, groups: int | None) -> Tally:
    """The number of tokens, sequences and tokens per group; with `keep`, of the kept tokens only."""
    tokens = kept_lengths(signals, keep).squeeze(1).double()
    present = tokens > 0
    if signals.rollout is not None:
        present = ordered_sum(tokens, signals.rollout, len(tokens)) > 0
    per_group = None
    if groups is not None:
        assert signals.group is not None
        per_group = ordered_sum(tokens, signals.group, groups)
    return Tally(tokens=tokens.sum(), sequences=present.sum().double(), group_tokens=per_group)


def kept_lengths(signals: Signals, keep: Spread | None) -> Tensor:
    """[B, 1]: the number of kept tokens of each row."""
    return signals.mask.lengths if keep is None else signals.mask.sum(keep)


def rollout_lengths(signals: Signals, keep: Spread | None) -> Tensor:
    """[B, 1]: the number of kept tokens in the rollout that each row belongs to."""
    return signals.segments("sequence").over_rows(kept_lengths(signals, keep))


def count(objective: Objective, aggregate: Aggregate, signals: Signals, groups: int | None) -> Counts:
    """The counts of these signals. `groups` is the size of the group tables; None if no part uses groups.

    `kept` is counted here if it depends on old and sampler log-probs only. If rejection reads the new log-probs,
    `evaluate` counts it (update scope).
    """
    counts = Counts(all=tally(signals, None, groups), tables=_tables(objective, signals, groups))
    if aggregate.denominator == "all" or objective.keep_reads_logprobs(aggregate):
        return counts
    context = Context(signals=signals, segments=signals.segments(objective.ratio.level), counts=counts, state={})
    keep = multiply(signals.keep, objective.adjustment(context).keep)
    return Counts(all=counts.all, kept=tally(signals, keep, groups), tables=counts.tables)


def _tables(objective: Objective, signals: Signals, groups: int | None) -> dict[str, Tensor]:
    rows = objective.ratio.tables(signals)
    if not rows:
        return {}
    assert groups is not None and signals.group is not None
    group = signals.group
    return {name: ordered_sum(values.to(torch.float64), group, groups) for name, values in rows.items()}
