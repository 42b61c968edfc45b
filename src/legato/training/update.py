"""An update: the gradient of the objective over all its micro-batches.

One pass: forward, objective, backward, micro-batch by micro-batch. Two passes: score all rows, objective once for the whole
update, then forward and backward of the rows that have a coefficient. Both give the gradient of the same loss; which is
cheaper depends on how many rows the trust region leaves without a gradient (break-even at a third). Rows that cannot have a
gradient whatever the policy computes (silent rows: advantage 0, no penalties) are left out of both, and of metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.counts import Counts
from legato.core.device import to_device
from legato.core.outcome import Coefficients, Outcome
from legato.core.scope import Scope
from legato.core.signals import Signals
from legato.core.sums import Mean, Sums, Total
from legato.diagnostics.metrics.measure import measure
from legato.objectives.slots import State
from legato.policy.experts.routing import Balance, Directions, Traffic
from legato.policy.policy import Channels, Policy
from legato.training.details import Marks
from legato.training.plan import Update
from legato.training.tables import Tables, needs_router_shift

BREAK_EVEN = 1 / 3
"""Two passes cost 1 + 3 (1 - c) forwards, one pass 3: equal at c = 1/3, where c is the share of the tokens computed.

Prompts are computed as long as one of their responses is, so they count among the tokens and are never saved.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The signals and the outcome of an update, before the optimizer moved the policy."""

    update: Update
    rows: Tensor
    """On the host: the rows of the step in `signals` and `outcome`, in their order; silent rows are left out."""
    signals: Signals
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The measures of an update. The gradient itself is in the parameters."""

    sums: Sums
    rows: int
    silent: int
    """How many rows were left out because their advantage is 0 and no penalty applies."""
    without_gradient: Tensor
    """How many of the scored rows had only coefficients of 0. On the device: reading it waits for the update."""
    savable: Tensor
    """The share of the computed tokens that were responses of such rows. On the device."""
    passes: int
    marks: Marks | None = None
    """Coefficients and log-ratios of each token, if `marked`."""


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
    load_balance: float = 0.0,
    marked: bool = False,
    look: Callable[[Look], None] | None = None,
) -> Report:
    """Add the gradient of the loss of this update to the parameters; `marked`: the report has the marks of each token.

    `load_balance` is the coefficient of the routers' own loss. It needs two passes, the first of which counts the choices
    of the whole update, and all rows in both, since every token has a gradient at the routers: `silent` must be None.
    `look` is called once with the signals and the outcome.
    """
    rows = update.rows
    parts = [part if silent is None else part[~silent[part]] for part in update.micro_batches]
    parts = [part for part in parts if len(part)]
    two = passes == 2 or algorithm.scope is Scope.UPDATE or load_balance > 0
    work = _Work(
        policy=policy,
        algorithm=algorithm,
        tables=tables,
        rows=rows,
        groups=tables.dense_groups(rows),
        counts=counts,
        state=state,
        first=update.is_first,
        load_balance=load_balance,
    )
    sums, dead, marks = Sums(), torch.zeros(0, dtype=torch.bool, device=tables.device), None
    if parts:
        signals, outcome, routing = (_two_passes if two else _one_pass)(work, parts)
        sums, dead = measure(signals, outcome) + routing, ~_rows_with_gradient(outcome.field)
        marks = Marks.from_outcome(torch.cat(parts), signals, outcome) if marked else None
        if look is not None:
            look(Look(update=update, rows=torch.cat(parts), signals=signals, outcome=outcome))
    lengths = tables.mask[to_device(torch.cat(parts), tables.device)].sum(1) if parts else dead
    return Report(
        sums=sums,
        rows=len(rows),
        silent=len(rows) - sum(map(len, parts)),
        without_gradient=dead.sum(),
        savable=(lengths * dead).sum() / max(1, sum(_tokens_read(policy, tables, part) for part in parts)),
        passes=2 if two else 1,
        marks=marks,
    )


def _tokens_read(policy: Policy, tables: Tables, rows: Tensor) -> int:
    """How many tokens the body reads for a micro-batch of these rows."""
    texts, groups = tables.texts, tables.texts.group[rows]
    prompts = texts.prompt_lengths[torch.unique(groups) if policy.packing and policy.shared_prompts else groups]
    return int(prompts.sum() + texts.lengths[rows].sum())


def count_update(algorithm: Algorithm, tables: Tables, update: Update) -> Counts:
    """The normalising counts over all rows of the update, silent rows included."""
    groups = tables.dense_groups(update.rows)
    size = int(groups.max()) + 1 if algorithm.objective.needs_groups(algorithm.aggregate) else None
    device = tables.device
    return algorithm.count(tables.signals(to_device(update.rows, device), to_device(groups, device), None), size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    policy: Policy
    algorithm: Algorithm
    tables: Tables
    rows: Tensor
    """On the host, ascending."""
    groups: Tensor
    """The group of each of these rows, dense over the update."""
    counts: Counts
    state: State
    first: bool
    """Whether no update of the step has moved the policy yet."""
    load_balance: float

    def directions(self, rows: Tensor) -> Directions | None:
        """The routing directions for passes over these rows; None without routers."""
        tables = self.tables
        if tables.routers is None:
            return None
        own = tables.anchors_itself(rows)
        # R2 has no record of rows that are their own anchor, and needs none: the routes of this very pass are the old ones.
        replay = tables.replay if tables.replay is None or tables.replay.of_sampler or not own else None
        return Directions(
            old=None if own else tables.old_experts,
            replay=replay,
            noise=tables.router_noise,
            count=self.load_balance > 0,
        )

    def signals(self, rows: Tensor, channels: Channels) -> Signals:
        """The signals of some rows of the update."""
        device = self.tables.device
        groups = to_device(self.groups[torch.searchsorted(self.rows, rows)], device)
        return self.tables.signals(to_device(rows, device), groups, channels, self.tables.anchors_itself(rows), self.first)

    def evaluate(self, signals: Signals) -> Outcome:
        return self.algorithm.evaluate(signals, self.counts, self.state)

    @property
    def width(self) -> int:
        """The longest response of the step."""
        return int(self.tables.texts.lengths.max())


def _one_pass(work: _Work, parts: list[Tensor]) -> tuple[Signals, Outcome, Sums]:
    """Signals and outcome over all rows, and sums about routing. Adds the gradient to the parameters."""
    # If no part weighs by routing, the routers' choices are only needed for the metrics at the end.
    reads_routing = needs_router_shift(work.algorithm)
    scores, traffic = list[Channels](), list[Traffic | None]()
    for rows in parts:
        with work.policy.accumulate_gradient(work.tables.texts, rows, work.directions(rows)) as forward:
            for piece in forward.pieces():
                channels = piece.channels if reads_routing else replace(piece.channels, routed=None)
                outcome = work.evaluate(work.signals(piece.rows, channels))
                piece.backward(outcome.field)
                scores.append(piece.channels.widen(work.width))
        traffic.append(forward.traffic)
    # Metrics are of the whole update. Joining the outcomes of the pieces would add loss terms in another order, and a piece
    # is only as wide as its longest row: sums would differ in their last bits with the cut into pieces. So the objective is
    # evaluated once more for all rows; that is some 250 small operations an update, whatever the number of rows.
    signals = work.signals(torch.cat(parts), Channels.join(scores))
    return signals, work.evaluate(signals), _count_missing_routes(work, traffic)


def _two_passes(work: _Work, parts: list[Tensor]) -> tuple[Signals, Outcome, Sums]:
    """Like `_one_pass`. The first pass has no gradient; the second runs only the rows that have coefficients."""
    texts, rows = work.tables.texts, torch.cat(parts)
    scores = [work.policy.score(texts, part, work.directions(part)) for part in parts]
    signals = work.signals(rows, Channels.join([channels.widen(work.width) for channels in scores]))
    outcome = work.evaluate(signals)
    traffic = [channels.traffic for channels in scores]
    del scores  # the joined table holds the same numbers
    balance, measures = _load_balance(work, traffic, signals)
    alive = _rows_with_gradient(outcome.field).cpu() if balance is None else torch.ones(len(rows), dtype=torch.bool)
    for numbers in _refill_micro_batches(work, rows, parts, alive):
        directions = work.directions(rows[numbers])
        if directions is not None:
            directions = replace(directions, record=False, balance=balance)
        with work.policy.accumulate_gradient(texts, rows[numbers], directions) as forward:
            start = 0
            for piece in forward.pieces():
                chosen = to_device(numbers[start : start + len(piece.rows)], work.tables.device)
                start += len(piece.rows)
                piece.backward(_cut_to_width(outcome.field.rows(chosen), piece.channels.logprobs.shape[1]))
    return signals, outcome, _count_missing_routes(work, traffic) + measures


def _load_balance(work: _Work, traffic: list[Traffic | None], signals: Signals) -> tuple[Balance | None, Sums]:
    """The load-balance loss of the update and its metric; None if it is off."""
    known = [each for each in traffic if each is not None]
    if not work.load_balance or not known:
        return None, Sums()
    choices, mass = (torch.stack([getattr(each, name) for each in known]).sum(0) for name in ("choices", "mass"))
    tokens = signals.mask.lengths.sum(dtype=torch.float64).clamp(min=1)
    shares = choices / choices.sum(-1, keepdim=True).clamp(min=1)
    value = (shares * mass / tokens).sum(-1).mean() * shares.shape[1]
    balance = Balance(shares=shares, tokens=tokens, scale=work.load_balance)
    return balance, Sums({"router/balance": Total(value)})


def _count_missing_routes(work: _Work, traffic: list[Traffic | None]) -> Sums:
    """The share of the tokens read that had no recorded route; empty unless routes are replayed."""
    known = [each for each in traffic if each is not None]
    if work.tables.replay is None or not known:
        return Sums()
    read = torch.full((), sum(len(each.tokens) for each in known), dtype=torch.float64, device=known[0].missing.device)
    missing = sum((each.missing for each in known[1:]), known[0].missing)
    return Sums({"router/replay_missing": Mean(missing, read)})


def _refill_micro_batches(work: _Work, rows: Tensor, parts: list[Tensor], alive: Tensor) -> list[Tensor]:
    """The `alive` rows, as positions in `rows`, in fewer micro-batches that are about as full as `parts`."""
    # Padded rows take more room than their tokens, so without packing no micro-batches are merged.
    most = max(_tokens_read(work.policy, work.tables, part) for part in parts) if work.policy.packing else 0
    refilled, sizes, start = list[Tensor](), list[int](), 0
    for part in parts:
        numbers = torch.arange(start, start + len(part))
        start += len(part)
        numbers = numbers[alive[numbers]]
        if not len(numbers):
            continue
        size = _tokens_read(work.policy, work.tables, rows[numbers])
        place = next((i for i, filled in enumerate(sizes) if filled + size <= most), None)
        if place is None:
            refilled.append(numbers)
            sizes.append(size)
        else:
            refilled[place], sizes[place] = torch.cat([refilled[place], numbers]), sizes[place] + size
    return refilled


def _cut_to_width(field: Coefficients, width: int) -> Coefficients:
    return replace(
        field,
        logprobs=field.logprobs[:, :width],
        entropy=None if field.entropy is None else field.entropy[:, :width],
        values=None if field.values is None else field.values[:, :width],
    )


def _rows_with_gradient(field: Coefficients) -> Tensor:
    """[rows] bool: whether any channel has a coefficient."""
    alive = (field.logprobs != 0).any(1)
    for other in (field.entropy, field.values):
        if other is not None:
            alive = alive | (other != 0).any(1)
    return alive
