"""An update: the gradient of the objective over all its packs.

One pass: forward with gradient, coefficients, backward, pack by pack. Two passes: forward without gradient over all rows,
coefficients once for the whole update, then forward and backward of the rows that have any. Both give the gradient of the
same loss; which is cheaper depends on how many rows the trust region leaves without a gradient (break-even at a third).
Rows that cannot have a gradient whatever the policy says (advantage 0, no penalties) are left out of both.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.counts import Counts
from legato.core.outcome import Coefficients
from legato.core.scope import Scope
from legato.core.sums import Sums
from legato.diagnostics.measure import measure
from legato.objectives.slots import State
from legato.policy.packs import pack
from legato.policy.policy import Channels, Policy
from legato.training.plan import Update
from legato.training.tables import Tables

BREAK_EVEN = 1 / 3
"""Two passes cost 1 + 3 (1 - c) forwards, one pass 3: equal at c = 1/3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an update did. The gradient is in the parameters."""

    sums: Sums
    rows: int
    silent: int
    """Rows left out beforehand: they have no advantage and nothing else pulls at them."""
    without_gradient: int
    """Of the rows scored, those whose coefficients were all 0."""
    passes: int


def silent_rows(algorithm: Algorithm, tables: Tables) -> Tensor | None:
    """[B] bool on the CPU: rows whose coefficients are certainly 0 in every channel; None where no row can be."""
    if algorithm.objective.penalties or algorithm.scope is Scope.UPDATE or tables.advantages is None:
        return None
    factor = tables.advantages if tables.keep is None else tables.advantages * tables.keep
    return (factor == 0).all(1).cpu()


def update_gradient(
    policy: Policy,
    algorithm: Algorithm,
    tables: Tables,
    update: Update,
    counts: Counts,
    state: State,
    *,
    passes: int,
    silent: Tensor | None,
) -> Report:
    """Add the gradient of the loss of this update to the parameters."""
    rows = update.rows
    packs = [p if silent is None else p[~silent[p]] for p in update.packs]
    packs = [p for p in packs if len(p)]
    left_out = len(rows) - sum(map(len, packs))
    two = passes == 2 or algorithm.scope is Scope.UPDATE
    work = _Work(policy=policy, algorithm=algorithm, tables=tables, rows=rows, counts=counts, state=state)
    sums, without = (_two_passes if two else _one_pass)(work, packs)
    return Report(sums=sums, rows=len(rows), silent=left_out, without_gradient=without, passes=2 if two else 1)


def count_update(algorithm: Algorithm, tables: Tables, update: Update) -> Counts:
    """What normalises, over all rows of the update, those left out included."""
    rows = update.rows.to(tables.device)
    groups = tables.dense_groups(rows)
    size = int(groups.max()) + 1 if algorithm.objective.needs_groups(algorithm.aggregate) else None
    return algorithm.count(tables.signals(rows, groups, None), size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    policy: Policy
    algorithm: Algorithm
    tables: Tables
    rows: Tensor
    counts: Counts
    state: State

    def groups(self, rows: Tensor) -> Tensor:
        """Group ids of some rows, in the numbering of the whole update."""
        device = self.tables.device
        dense = self.tables.dense_groups(self.rows.to(device))
        return dense[torch.searchsorted(self.rows, rows).to(device)]


def _one_pass(work: _Work, packs: list[Tensor]) -> tuple[Sums, int]:
    sums, without = Sums(), torch.zeros((), dtype=torch.int64, device=work.tables.device)
    for rows in packs:
        placed = rows.to(work.tables.device)
        with work.policy.reading(pack(work.tables.texts, placed)) as channels:
            signals = work.tables.signals(placed, work.groups(rows), channels, work.tables.anchors_itself(rows))
            outcome = work.algorithm.evaluate(signals, work.counts, work.state)
            sums = sums + measure(signals, outcome)
            without = without + (~_alive(outcome.field)).sum()
            outcome.loss.backward()  # type: ignore[no-untyped-call]
    return sums, int(without)


def _two_passes(work: _Work, packs: list[Tensor]) -> tuple[Sums, int]:
    if not packs:
        return Sums(), 0
    tables, device = work.tables, work.tables.device
    rows = torch.cat(packs)
    placed = rows.to(device)
    channels = _first_pass(work, packs)
    signals = tables.signals(placed, work.groups(rows), channels, tables.anchors_itself(rows))
    outcome = work.algorithm.evaluate(signals, work.counts, work.state)
    sums = measure(signals, outcome)
    alive = _alive(outcome.field).cpu()
    start = 0
    for part in packs:
        numbers = torch.arange(start, start + len(part))
        start += len(part)
        numbers = numbers[alive[numbers]]
        if not len(numbers):
            continue
        with work.policy.reading(pack(tables.texts, rows[numbers].to(device))) as again:
            field = _narrow(outcome.field.rows(numbers.to(device)), again.logprobs.shape[1])
            field.tie(
                again.logprobs.new_zeros(()),
                logprobs=again.logprobs,
                entropy=again.entropy if field.entropy is not None else None,
                values=again.values if field.values is not None else None,
            ).backward()  # type: ignore[no-untyped-call]
    return sums, int((~alive).sum())


def _first_pass(work: _Work, packs: list[Tensor]) -> Channels:
    """The channels of all rows without a gradient, one table over the packs' rows in order."""
    width = int(work.tables.texts.lengths.max())
    found: list[Channels] = []
    for rows in packs:
        channels = work.policy.score(work.tables.texts, rows.to(work.tables.device))
        found.append(_widen(channels, width))
    values = [c.values for c in found if c.values is not None]
    return Channels(
        logprobs=torch.cat([c.logprobs for c in found]),
        entropy=torch.cat([c.entropy for c in found]),
        values=torch.cat(values) if values else None,
    )


def _widen(channels: Channels, width: int) -> Channels:
    def pad(table: Tensor) -> Tensor:
        return torch.nn.functional.pad(table, (0, width - table.shape[1]))

    values = None if channels.values is None else pad(channels.values)
    return Channels(logprobs=pad(channels.logprobs), entropy=pad(channels.entropy), values=values)


def _narrow(field: Coefficients, width: int) -> Coefficients:
    return replace(
        field,
        logprobs=field.logprobs[:, :width],
        entropy=None if field.entropy is None else field.entropy[:, :width],
        values=None if field.values is None else field.values[:, :width],
    )


def _alive(field: Coefficients) -> Tensor:
    """[rows] bool: whether any channel has a coefficient."""
    alive = (field.logprobs != 0).any(1)
    for other in (field.entropy, field.values):
        if other is not None:
            alive = alive | (other != 0).any(1)
    return alive
