"""An update: the gradient of the objective over all its micro-batches.

One pass: forward, objective, backward, micro-batch by micro-batch. Two passes: score all rows, objective once for the whole
update, then forward and backward of the rows that have a coefficient. Both give the gradient of the same loss; which is
cheaper depends on how many rows the trust region leaves without a gradient (break-even at a third). Rows that cannot have a
gradient whatever the policy computes (silent rows: advantage 0, no penalties) are left out of both, and of metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.counts import Counts
from legato.core.device import to_device
from legato.core.outcome import Coefficients, Outcome
from legato.core.scope import Scope
from legato.core.signals import Signals
from legato.core.sums import Mean, Sums, Total
from legato.core.world import OneProcess, World
from legato.diagnostics.metrics.measure import measure
from legato.objectives.slots import State
from legato.policy.experts.routing import Balance, Directions, Routed, Traffic
from legato.policy.policy import Channels, Policy
from legato.training.details import Marks
from legato.training.plan import Update
from legato.training.ranks.idle import count_idle_passes, run_idle_passes
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
    """How many of the rows this rank scored had only coefficients of 0. On the device: reading it waits for the update."""
    savable: Tensor
    """The tokens of the responses of such rows. On the device."""
    tokens_read: int
    """The tokens of all rows that are not silent, on all ranks, with each prompt once."""
    passes: int
    marks: Marks | None = None
    """Coefficients and log-ratios of each token, if `marked`."""


def silent_rows(algorithm: Algorithm, tables: Tables) -> Tensor | None:
    """[B] bool on the CPU: rows whose coefficients are certainly 0 in every channel; None where no row can be."""
    if algorithm.objective.penalties or reads_whole_update(algorithm, tables) or tables.advantages is None:
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
    world: World | None = None,
) -> Report:
    """Add the gradient of the loss of this update to the parameters; `marked`: the report has the marks of each token.

    With several ranks each adds the gradient of its share of the rows, normalised by the counts of the whole update, and
    reports that share: reports add up over ranks.

    `load_balance` is the coefficient of the routers' own loss. It needs two passes, the first of which counts the choices
    of the whole update, and all rows in both, since every token has a gradient at the routers: `silent` must be None.
    `look` is called once with the signals and the outcome.
    """
    world = OneProcess() if world is None else world
    rows = update.rows
    parts = [part if silent is None else part[~silent[part]] for part in update.share(world.rank)]
    parts = [part for part in parts if len(part)]
    two = passes == 2 or reads_whole_update(algorithm, tables) or load_balance > 0
    work = _Work(
        policy=policy,
        algorithm=algorithm,
        tables=tables,
        update=update,
        rows=rows,
        groups=tables.dense_groups(rows),
        counts=counts,
        state=state,
        load_balance=load_balance,
        world=world,
    )
    done = (_two_passes if two else _one_pass)(work, parts)
    sums, dead, marks, lengths = (
        done.routing,
        torch.zeros(0, dtype=torch.bool, device=tables.device),
        None,
        tables.mask[:0, 0],
    )
    if done.signals is not None and done.outcome is not None:
        signals, outcome = done.signals, done.outcome
        sums, dead = measure(signals, outcome) + sums, ~_rows_with_gradient(outcome.field)
        lengths = tables.mask[to_device(done.rows, tables.device)].sum(1)
        marks = Marks.from_outcome(done.rows, signals, outcome) if marked else None
        if look is not None:
            look(Look(update=update, rows=done.rows, signals=signals, outcome=outcome))
    return Report(
        sums=sums,
        rows=len(rows),
        silent=0 if silent is None else int(silent[rows].sum()),
        without_gradient=dead.sum(),
        savable=(lengths * dead).sum(),
        tokens_read=_tokens_read(policy, tables, rows if silent is None else rows[~silent[rows]]),
        passes=2 if two else 1,
        marks=marks,
    )


def _tokens_read(policy: Policy, tables: Tables, rows: Tensor) -> int:
    """How many tokens the body reads for these rows, if they are one micro-batch."""
    texts, groups = tables.texts, tables.texts.group[rows]
    prompts = texts.prompt_lengths[torch.unique(groups) if policy.packing and policy.shared_prompts else groups]
    return int(prompts.sum() + texts.lengths[rows].sum())


def reads_whole_update(algorithm: Algorithm, tables: Tables) -> bool:
    """Whether the objective reads all rows of an update at once: rows of one rollout may lie in several micro-batches."""
    return algorithm.scope is Scope.UPDATE or tables.batch.pieces is not None


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
    update: Update
    rows: Tensor
    """All rows of the update, on the host, ascending."""
    groups: Tensor
    """The group of each of these rows, dense over the update."""
    counts: Counts
    state: State
    load_balance: float
    world: World

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
        return self.tables.signals(
            to_device(rows, device), groups, channels, self.tables.anchors_itself(rows), self.update.is_first
        )

    def evaluate(self, signals: Signals) -> Outcome:
        return self.algorithm.evaluate(signals, self.counts, self.state)

    @property
    def width(self) -> int:
        """The longest response of the step."""
        return int(self.tables.texts.lengths.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """What a rank reports of an update: signals and outcome of some rows, and sums about routing."""

    rows: Tensor
    """On the host, in the order of the signals."""
    signals: Signals | None = None
    """None: the rank has nothing to report."""
    outcome: Outcome | None = None
    routing: Sums = field(default_factory=Sums)


def _one_pass(work: _Work, parts: list[Tensor]) -> _Done:
    """Forward, objective and backward of each micro-batch. Adds the gradient to the parameters."""
    # If no part weighs by routing, the routers' choices are only needed for the metrics at the end.
    reads_routing = needs_router_shift(work.algorithm)
    scores, outcomes, traffic = list[Channels](), list[Outcome](), list[Traffic | None]()
    idle = count_idle_passes(work.policy, len(parts), work.world)
    for rows in parts:
        with work.policy.accumulate_gradient(work.tables.texts, rows, work.directions(rows)) as forward:
            for piece in forward.pieces():
                channels = piece.channels if reads_routing else replace(piece.channels, routed=None)
                outcome = work.evaluate(work.signals(piece.rows, channels))
                piece.backward(outcome.field)
                scores.append(piece.channels)
                outcomes.append(outcome)
        traffic.append(forward.traffic)
    run_idle_passes(work.policy, work.tables.texts, idle, backward=True)
    if not parts:
        return _Done(rows=torch.zeros(0, dtype=torch.int64))
    rows = torch.cat(parts)
    signals = work.signals(rows, Channels.join([channels.widen(work.width) for channels in scores]))
    # Metrics are of the whole update, which is one piece where its logits fit at once. Joining the outcomes of several would
    # add loss terms in another order, and a piece is only as wide as its longest row: metrics would differ in their last
    # bits with the cut into pieces. Only then is the objective evaluated once more for all rows.
    whole = len(outcomes) == 1 and scores[0].logprobs.shape[1] == work.width
    outcome = outcomes[0] if whole else work.evaluate(signals)
    return _Done(rows=rows, signals=signals, outcome=outcome, routing=_count_missing_routes(work, traffic))


def _two_passes(work: _Work, parts: list[Tensor]) -> _Done:
    """Like `_one_pass`. The first pass has no gradient; the second runs only the rows that have coefficients."""
    idle = count_idle_passes(work.policy, len(parts), work.world)
    scores = [work.policy.score(work.tables.texts, part, work.directions(part)) for part in parts]
    run_idle_passes(work.policy, work.tables.texts, idle)
    traffic = [channels.traffic for channels in scores]
    balance, measures = _load_balance(work, traffic)
    routing = _count_missing_routes(work, traffic) + measures
    rows = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    channels = Channels.join([channels.widen(work.width) for channels in scores]) if scores else None
    del scores  # the joined table holds the same numbers
    if work.world.size > 1 and reads_whole_update(work.algorithm, work.tables):
        return _backward_of_share(work, parts, rows, channels, balance, routing)
    signals = outcome = None
    if channels is not None:
        signals = work.signals(rows, channels)
        outcome = work.evaluate(signals)
    _second_pass(work, rows, parts, None if outcome is None else outcome.field, balance)
    return _Done(rows=rows, signals=signals, outcome=outcome, routing=routing)


def _backward_of_share(
    work: _Work, parts: list[Tensor], rows: Tensor, channels: Channels | None, balance: Balance | None, routing: Sums
) -> _Done:
    """The second pass where coefficients depend on all rows: every rank computes all of them and uses its own.

    Rank 0 reports for all.
    """
    update, everything = work.update, torch.cat(work.update.micro_batches)
    # Micro-batches are in the order of ranks, so the rows of this rank lie together.
    first = sum(map(len, [part for rank in range(work.world.rank) for part in update.share(rank)]))
    own = slice(first, first + len(rows))
    signals = work.signals(everything, _spread_channels(work, channels, own))
    outcome = work.evaluate(signals)
    _second_pass(work, rows, parts, outcome.field.rows(own), balance)
    if work.world.rank:
        return _Done(rows=everything[:0], routing=routing)
    return _Done(rows=everything, signals=signals, outcome=outcome, routing=routing)


def _second_pass(
    work: _Work, rows: Tensor, parts: list[Tensor], coefficients: Coefficients | None, balance: Balance | None
) -> None:
    """Forward and backward of the rows that have a coefficient; `coefficients` are those of `rows`, None without rows."""
    batches: list[Tensor] = []
    if parts and coefficients is not None:
        alive = _rows_with_gradient(coefficients).cpu() if balance is None else torch.ones(len(rows), dtype=torch.bool)
        batches = _refill_micro_batches(work, rows, parts, alive)
    idle = count_idle_passes(work.policy, len(batches), work.world)
    for numbers in batches:
        directions = work.directions(rows[numbers])
        if directions is not None:
            directions = replace(directions, record=False, balance=balance)
        with work.policy.accumulate_gradient(work.tables.texts, rows[numbers], directions) as forward:
            start = 0
            for piece in forward.pieces():
                assert coefficients is not None
                chosen = to_device(numbers[start : start + len(piece.rows)], work.tables.device)
                start += len(piece.rows)
                piece.backward(_cut_to_width(coefficients.rows(chosen), piece.channels.logprobs.shape[1]))
    run_idle_passes(work.policy, work.tables.texts, idle, backward=True)


def _spread_channels(work: _Work, channels: Channels | None, own: slice) -> Channels:
    """The channels of all rows of the update, each from the rank that scored it; `own` are the rows of this rank."""
    device, policy, shape = work.tables.device, work.policy, (len(work.rows), work.width)

    def spread(table: Tensor | None, dtype: torch.dtype, *rest: int) -> Tensor:
        whole = torch.zeros(*shape, *rest, dtype=dtype, device=device)
        if table is not None:
            whole[own] = table
        return work.world.sum_table(whole)

    mine = channels.routed if channels is not None else None
    routers, routed = policy.routers, None
    if routers is not None:
        routed = Routed(
            experts=spread(None if mine is None else mine.experts, routers.index, *routers.shape),
            logprobs=spread(None if mine is None else mine.logprobs, policy.dtype, *routers.shape),
            entropy=spread(None if mine is None else mine.entropy, policy.dtype),
        )
    values = None
    if policy.value_head is not None:
        values = spread(None if channels is None else channels.values, policy.dtype)
    return Channels(
        logprobs=spread(None if channels is None else channels.logprobs, policy.dtype),
        entropy=spread(None if channels is None else channels.entropy, policy.dtype),
        values=values,
        routed=routed,
    )


def _load_balance(work: _Work, traffic: list[Traffic | None]) -> tuple[Balance | None, Sums]:
    """The load-balance loss of the update and its metric, which rank 0 reports; None if it is off."""
    if not work.load_balance:
        return None, Sums()
    routers, device = work.policy.routers, work.tables.device
    assert routers is not None, "checked before the run began"
    empty = torch.zeros(len(routers.modules), routers.experts, dtype=torch.float64, device=device)
    known = [each for each in traffic if each is not None]
    choices, mass = (
        work.world.sum_table(torch.stack([getattr(each, name) for each in known]).sum(0) if known else empty)
        for name in ("choices", "mass")
    )
    tokens = work.tables.mask[to_device(work.rows, device)].sum(dtype=torch.float64).clamp(min=1)
    shares = choices / choices.sum(-1, keepdim=True).clamp(min=1)
    value = (shares * mass / tokens).sum(-1).mean() * shares.shape[1]
    balance = Balance(shares=shares, tokens=tokens, scale=work.load_balance)
    return balance, Sums() if work.world.rank else Sums({"router/balance": Total(value)})


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
