"""An update: the gradient of the objective over all its packs.

One pass: forward with gradient, coefficients, backward, pack by pack. Two passes: forward without gradient over all rows,
coefficients once for the whole update, then forward and backward of the rows that have any. Both give the gradient of the
same loss; which is cheaper depends on how many rows the trust region leaves without a gradient (break-even at a third).
Rows that cannot have a gradient whatever the policy says (advantage 0, no penalties) are left out of both, and of metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.counts import Counts
from legato.core.device import sent
from legato.core.outcome import Coefficients, Outcome
from legato.core.scope import Scope
from legato.core.signals import Signals
from legato.core.sums import Mean, Sums, Total
from legato.diagnostics.metrics.measure import measure
from legato.objectives.slots import State
from legato.policy.experts.routing import Balance, Directions, Traffic
from legato.policy.policy import Channels, Policy, joined
from legato.training.details import Marks
from legato.training.plan import Update
from legato.training.tables import Tables, needs_router_shift

BREAK_EVEN = 1 / 3
"""Two passes cost 1 + 3 (1 - c) forwards, one pass 3: equal at c = 1/3, where c is the share of the tokens computed.

Prompts are computed as long as one of their responses is, so they count among the tokens and are never saved.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """An update as its objective saw it, before the optimizer moved the policy."""

    update: Update
    rows: Tensor
    """On the host: of which rows of the step signals and outcome speak, in their order; silent rows are left out."""
    signals: Signals
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an update did. The gradient is in the parameters."""

    sums: Sums
    rows: int
    silent: int
    """Rows left out beforehand: they have no advantage and nothing else pulls at them."""
    without_gradient: Tensor
    """Of the rows scored, those whose coefficients were all 0. On the device: reading it waits for the update."""
    savable: Tensor
    """What share of the tokens computed were responses of such rows. On the device."""
    passes: int
    marks: Marks | None = None
    """What it saw at each token, where asked for."""


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
    """Add the gradient of the loss of this update to the parameters; `marked`: the report says what each token had.

    `load_balance` is the coefficient of the routers' own loss. It needs two passes, the first of which counts the choices
    of the whole update, and all rows in both, since every token pulls at the routers: `silent` must be None. `look` is
    called once with what the objective read and decided.
    """
    rows = update.rows
    packs = [p if silent is None else p[~silent[p]] for p in update.packs]
    packs = [p for p in packs if len(p)]
    left_out = len(rows) - sum(map(len, packs))
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
    if packs:
        signals, outcome, more = (_two_passes if two else _one_pass)(work, packs)
        sums, dead = measure(signals, outcome) + more, ~_alive(outcome.field)
        marks = Marks.of(torch.cat(packs), signals, outcome) if marked else None
        if look is not None:
            look(Look(update=update, rows=torch.cat(packs), signals=signals, outcome=outcome))
    lengths = tables.mask[sent(torch.cat(packs), tables.device)].sum(1) if packs else dead
    return Report(
        sums=sums,
        rows=len(rows),
        silent=left_out,
        without_gradient=dead.sum(),
        savable=(lengths * dead).sum() / max(1, sum(_computed(policy, tables, rows) for rows in packs)),
        passes=2 if two else 1,
        marks=marks,
    )


def _computed(policy: Policy, tables: Tables, rows: Tensor) -> int:
    """How many tokens the body reads for a pack of these rows."""
    texts, groups = tables.texts, tables.texts.group[rows]
    prompts = texts.prompt_lengths[torch.unique(groups) if policy.packing and policy.shared_prompts else groups]
    return int(prompts.sum() + texts.lengths[rows].sum())


def count_update(algorithm: Algorithm, tables: Tables, update: Update) -> Counts:
    """What normalises, over all rows of the update, those left out included."""
    groups = tables.dense_groups(update.rows)
    size = int(groups.max()) + 1 if algorithm.objective.needs_groups(algorithm.aggregate) else None
    device = tables.device
    return algorithm.count(tables.signals(sent(update.rows, device), sent(groups, device), None), size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    policy: Policy
    algorithm: Algorithm
    tables: Tables
    rows: Tensor
    """On the host, ascending."""
    groups: Tensor
    """Of those rows, dense over the update."""
    counts: Counts
    state: State
    first: bool
    """Whether no update of the step has moved the policy yet."""
    load_balance: float

    def directions(self, rows: Tensor) -> Directions | None:
        """What the passes over these rows are told about routing."""
        tables = self.tables
        if tables.routers is None:
            return None
        own = tables.anchors_itself(rows)
        # R2 has no record of rows that are their own anchor, and needs none: the routes of this very pass are the old ones.
        replay = tables.replay if tables.replay is None or tables.replay.of_sampler or not own else None
        return Directions(old=None if own else tables.old_experts, replay=replay, count=self.load_balance > 0)

    def outcome(self, rows: Tensor, channels: Channels, measured: bool = True) -> tuple[Signals, Outcome]:
        """The objective on some rows of the update, and what it read; `measured`: with what only measures read."""
        device = self.tables.device
        groups = sent(self.groups[torch.searchsorted(self.rows, rows)], device)
        own = self.tables.anchors_itself(rows)
        if not measured and not needs_router_shift(self.algorithm):
            channels = replace(channels, routed=None)
        signals = self.tables.signals(sent(rows, device), groups, channels, own, self.first)
        return signals, self.algorithm.evaluate(signals, self.counts, self.state)


def _one_pass(work: _Work, packs: list[Tensor]) -> tuple[Signals, Outcome, Sums]:
    """What the objective read and decided over all rows of the packs, and measures beside it."""
    width, seen, gone = int(work.tables.texts.lengths.max()), list[Channels](), list[Traffic | None]()
    for rows in packs:

        def respond(part: range, channels: Channels, rows: Tensor = rows) -> Coefficients:
            detached = _detached(channels)
            seen.append(_widen(detached, width))
            return work.outcome(rows[part.start : part.stop], detached, measured=False)[1].field

        gone.append(work.policy.learn(work.policy.pack(work.tables.texts, rows), respond, work.directions(rows)))
    # Some 250 small operations whatever the number of rows: once an update, not once a run of the head.
    signals, outcome = work.outcome(torch.cat(packs), joined(seen))
    return signals, outcome, _replayed(work, gone)


def _two_passes(work: _Work, packs: list[Tensor]) -> tuple[Signals, Outcome, Sums]:
    tables, device = work.tables, work.tables.device
    rows = torch.cat(packs)
    channels, gone = _first_pass(work, packs)
    signals, outcome = work.outcome(rows, channels)
    balance, measured = _balance(work, gone, signals)
    alive = _alive(outcome.field).cpu() if balance is None else torch.ones(len(rows), dtype=torch.bool)
    for numbers in _refilled(work, rows, packs, alive):

        def respond(run: range, channels: Channels, numbers: Tensor = numbers) -> Coefficients:
            chosen = outcome.field.rows(sent(numbers[run.start : run.stop], device))
            return _narrow(chosen, channels.logprobs.shape[1])

        directions = work.directions(rows[numbers])
        if directions is not None:
            directions = replace(directions, record=False, balance=balance)
        work.policy.learn(work.policy.pack(tables.texts, rows[numbers]), respond, directions)
    return signals, outcome, _replayed(work, gone) + measured


def _balance(work: _Work, gone: list[Traffic | None], signals: Signals) -> tuple[Balance | None, Sums]:
    """The load-balance loss of the update and its measure; None where it is off."""
    found = [traffic for traffic in gone if traffic is not None]
    if not work.load_balance or not found:
        return None, Sums()
    choices, mass = (torch.stack([getattr(t, name) for t in found]).sum(0) for name in ("choices", "mass"))
    tokens = signals.mask.lengths.sum(dtype=torch.float64).clamp(min=1)
    shares = choices / choices.sum(-1, keepdim=True).clamp(min=1)
    value = (shares * mass / tokens).sum(-1).mean() * shares.shape[1]
    balance = Balance(shares=shares, tokens=tokens, scale=work.load_balance)
    return balance, Sums({"router/balance": Total(value)})


def _replayed(work: _Work, gone: list[Traffic | None]) -> Sums:
    """How many of the tokens read had no record where routes are replayed."""
    found = [traffic for traffic in gone if traffic is not None]
    if work.tables.replay is None or not found:
        return Sums()
    read = torch.full((), sum(len(traffic.tokens) for traffic in found), dtype=torch.float64, device=found[0].missing.device)
    missing = sum((traffic.missing for traffic in found[1:]), found[0].missing)
    return Sums({"router/replay_missing": Mean(missing, read)})


def _refilled(work: _Work, rows: Tensor, packs: list[Tensor], alive: Tensor) -> list[Tensor]:
    """The rows that are left, as numbers among `rows`, in fewer packs that are about as full as the ones they come from."""
    # A rectangle of padded rows is larger than its tokens: those packs stay apart.
    most = max(_computed(work.policy, work.tables, part) for part in packs) if work.policy.packing else 0
    found, sizes, start = list[Tensor](), list[int](), 0
    for part in packs:
        numbers = torch.arange(start, start + len(part))
        start += len(part)
        numbers = numbers[alive[numbers]]
        if not len(numbers):
            continue
        size = _computed(work.policy, work.tables, rows[numbers])
        place = next((i for i, filled in enumerate(sizes) if filled + size <= most), None)
        if place is None:
            found.append(numbers)
            sizes.append(size)
        else:
            found[place], sizes[place] = torch.cat([found[place], numbers]), sizes[place] + size
    return found


def _first_pass(work: _Work, packs: list[Tensor]) -> tuple[Channels, list[Traffic | None]]:
    """The channels of all rows without a gradient, one table over the packs' rows in order; and which way tokens went."""
    width = int(work.tables.texts.lengths.max())
    found = [work.policy.scored(work.tables.texts, rows, work.directions(rows)) for rows in packs]
    return joined([_widen(channels, width) for channels, _ in found]), [traffic for _, traffic in found]


def _detached(channels: Channels) -> Channels:
    """What an objective reads: its coefficients are found at leaves of its own."""
    values = None if channels.values is None else channels.values.detach()
    return replace(channels, logprobs=channels.logprobs.detach(), entropy=channels.entropy.detach(), values=values)


def _widen(channels: Channels, width: int) -> Channels:
    def pad(table: Tensor) -> Tensor:
        return torch.nn.functional.pad(table, (0, width - table.shape[1]))

    values = None if channels.values is None else pad(channels.values)
    routed = None if channels.routed is None else channels.routed.widened(width)
    return Channels(logprobs=pad(channels.logprobs), entropy=pad(channels.entropy), values=values, routed=routed)


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
