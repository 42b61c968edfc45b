"""The anchor of a step: the policy before the first update, scored in the same micro-batches as the updates.

Scored in the same micro-batches by the same code, the old log-probs equal the first update's new ones to the bit: s = 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.device import to_device
from legato.core.row_table import RowTable
from legato.core.scope import Scope
from legato.core.world import OneProcess, World
from legato.policy.experts.routing import Directions, Record
from legato.policy.model.reference import Reference
from legato.policy.policy import Channels, Policy
from legato.training.plan import Update
from legato.training.ranks.idle import count_idle_passes, run_idle_passes
from legato.training.tables import Tables, needs


def estimator_reads_anchor(algorithm: Algorithm) -> bool:
    """Whether advantages need the anchor: the estimator reads values, or the reward has a KL term."""
    return bool({"values", "old_logprobs", "ref_logprobs"} & set(algorithm.advantage.needs()))


def first_update_anchors_itself(algorithm: Algorithm, epochs: int) -> bool:
    """Whether the first update may use its own log-probs as anchor, because nothing reads old log-probs before it."""
    objective = algorithm.objective
    return (
        epochs == 1
        and not objective.corrections
        and not estimator_reads_anchor(algorithm)
        and algorithm.scope is not Scope.GROUP
        and "values" not in needs(algorithm)
    )


def holds_all_routes(algorithm: Algorithm, epochs: int, *, pieces: bool) -> bool:
    """Whether each of several ranks holds the routes of all rows of a step, not of its own alone: later epochs deal rows to
    other ranks, and some objectives read all rows of an update, as all do whose rollouts are several rows (`pieces`)."""
    return epochs > 1 or algorithm.scope is Scope.UPDATE or pieces


def needs_reference(algorithm: Algorithm) -> bool:
    return "ref_logprobs" in needs(algorithm) | set(algorithm.advantage.needs())


def anchor(
    tables: Tables,
    policy: Policy,
    reference: Reference | None,
    updates: Sequence[Update],
    *,
    choice: str,
    skip_first: bool,
    silent: Tensor | None = None,
    replay: str = "off",
    shift: bool = False,
    whole_update: bool = False,
    world: World | None = None,
) -> Tables:
    """The tables with old log-probs ('recompute' or 'sampler'), reference log-probs, old values and old routes.

    `silent` [B] marks rows that need no scores. If the engine's log-probs are the anchor, the old policy is still scored
    when its routes are needed: to replay them (R2), or to weigh with their `shift`. Each rank scores the micro-batches that
    it has in the updates, and all ranks get all scores. `whole_update`: the objective reads all rows of an update at once.
    """
    world = OneProcess() if world is None else world
    everything = [update for update in updates if update.epoch == 0]
    must_score = policy.value_head is not None or (policy.routers is not None and (replay == "R2" or shift))
    if choice == "sampler" and not must_score:
        anchored = torch.ones(len(tables.batch), dtype=torch.bool)
        experts = None if tables.sampler_experts is None else RowTable.whole(tables.sampler_experts)
        tables = replace(tables, old_logprobs=tables.sampler_logprobs, anchored=anchored, old_experts=experts)
    else:
        later = skip_first and policy.value_head is None and choice != "sampler"
        chosen = [update for update in everything if update.index > 0] if later else everything
        # As `holds_all_routes` says it of a run.
        spread = world.size > 1 and (whole_update or any(update.epoch for update in updates))
        tables = _score_old_policy(tables, policy, chosen, silent, replay, world, spread_routes=spread)
        if choice == "sampler":
            tables = replace(tables, old_logprobs=tables.sampler_logprobs)
    if reference is not None:
        by_reference = _score_old_policy(tables, reference, everything, None, "off", world)
        tables = replace(tables, ref_logprobs=by_reference.old_logprobs)
    return tables


def _score_old_policy(
    tables: Tables,
    policy: Policy | Reference,
    updates: Sequence[Update],
    silent: Tensor | None,
    replay: str,
    world: World,
    *,
    spread_routes: bool = False,
) -> Tables:
    """The tables with `old_logprobs` (and values and routes) of a policy, for the rows of these updates."""
    texts, device = tables.texts, tables.device
    old = torch.zeros(texts.tokens.shape, dtype=_logprob_dtype(policy), device=device)
    values = torch.zeros_like(old) if isinstance(policy, Policy) and policy.value_head is not None else None
    anchored = torch.zeros(len(texts), dtype=torch.bool)
    for rows in _drop_silent(silent, [rows for update in updates for rows in update.micro_batches]):
        anchored[rows] = True
    own = _drop_silent(silent, [rows for update in updates for rows in update.share(world.rank)])
    routes = None
    if isinstance(policy, Policy) and policy.routers is not None:
        routes = _Routes(tables, policy, replay, anchored.nonzero().squeeze(1) if spread_routes else _joined(own))
    idle = count_idle_passes(policy, len(own), world)
    for rows in own:
        place = to_device(rows, device)
        channels = policy.score(texts, rows) if routes is None else routes.score(rows, place)
        width = channels.logprobs.shape[1]
        old[place, :width] = channels.logprobs
        if values is not None and channels.values is not None:
            values[place, :width] = channels.values
    run_idle_passes(policy, texts, idle)
    values = None if values is None else world.sum_table(values)
    tables = replace(tables, old_logprobs=world.sum_table(old), anchored=anchored, old_values=values)
    if routes is None:
        return tables
    if spread_routes:
        routes.spread(updates, world)
    return routes.add_to(tables)


def _drop_silent(silent: Tensor | None, micro_batches: Sequence[Tensor]) -> list[Tensor]:
    """The micro-batches without silent rows; empty ones are dropped."""
    remaining = micro_batches if silent is None else [rows[~silent[rows]] for rows in micro_batches]
    return [rows for rows in remaining if len(rows)]


def _joined(micro_batches: Sequence[Tensor]) -> Tensor:
    """The rows of these micro-batches, ascending."""
    return torch.cat(list(micro_batches)).sort().values if micro_batches else torch.zeros(0, dtype=torch.int64)


class _Routes:
    """Collects the choices of the old policy's routers while it is scored."""

    def __init__(self, tables: Tables, policy: Policy, replay: str, rows: Tensor) -> None:
        """`rows`: those whose routes this process needs in the updates."""
        assert policy.routers is not None
        self.texts, self.policy = tables.texts, policy
        count, width = tables.texts.tokens.shape
        zeros = partial(RowTable.zeros, rows, count, (width, *policy.routers.shape), device=tables.device)
        self.experts = zeros(dtype=policy.routers.index)
        self.logprobs = zeros(dtype=policy.dtype)
        self.record = Record.empty(tables.texts, policy.routers, tables.device) if replay == "R2" else None
        self.directions = Directions(replay=tables.replay if replay == "R3" else None)

    def score(self, rows: Tensor, place: Tensor) -> Channels:
        """The channels of some rows; `place`: the same rows on the device."""
        channels = self.policy.score(self.texts, rows, self.directions)
        assert channels.routed is not None and channels.traffic is not None
        self.experts.write(place, channels.routed.experts)
        self.logprobs.write(place, channels.routed.logprobs)
        if self.record is not None:
            self.record.note(channels.traffic)
        return channels

    def spread(self, updates: Sequence[Update], world: World) -> None:
        """Give all ranks the routes of all rows. The prompt of a group that several ranks scored is that of the first."""
        if self.record is not None:
            others = torch.ones(len(self.texts.prompts), dtype=torch.bool)
            taken = torch.zeros(len(self.texts.prompts), dtype=torch.bool)
            for rank in range(world.size):
                rows = [rows for update in updates for rows in update.share(rank)]
                groups = torch.unique(self.texts.group[torch.cat(rows)]) if rows else torch.empty(0, dtype=torch.int64)
                if rank == world.rank:
                    others[groups] = taken[groups]
                taken[groups] = True
            columns = self.texts.prompts.shape[1]
            places = to_device(others.repeat_interleave(columns).nonzero().squeeze(1), self.record.tokens.device)
            experts, tokens = self.record.experts.clone(), self.record.tokens + 1
            experts[places], tokens[places] = 0, 0
            self.record = replace(self.record, experts=world.sum_table(experts), tokens=world.sum_table(tokens) - 1)
        # All ranks hold the same rows, and each row was scored by one of them.
        self.experts, self.logprobs = (
            replace(table, values=world.sum_table(table.values)) for table in (self.experts, self.logprobs)
        )

    def add_to(self, tables: Tables) -> Tables:
        return replace(
            tables,
            old_experts=self.experts,
            old_router_logprobs=self.logprobs,
            replay=tables.replay if self.record is None else self.record,
        )


def _logprob_dtype(scorer: Policy | Reference) -> torch.dtype:
    return scorer.dtype if isinstance(scorer, Policy) else scorer.policy.dtype
