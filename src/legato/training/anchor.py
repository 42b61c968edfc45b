"""The anchor of a step: the policy as it was before the first update, scored in the very packs of the updates.

Scored in the same packs by the same code, the old log-probs equal the first update's new ones to the bit, so that s = 1.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.scope import Scope
from legato.policy.policy import Policy
from legato.policy.reference import Reference
from legato.training.plan import Update
from legato.training.tables import Tables, needs


def estimator_reads_anchor(algorithm: Algorithm) -> bool:
    """Whether advantages wait for the anchor: values, or a KL term inside the reward."""
    return bool({"values", "old_logprobs", "ref_logprobs"} & set(algorithm.advantage.needs()))


def first_update_anchors_itself(algorithm: Algorithm, epochs: int) -> bool:
    """Whether the first update may take its own log-probs as anchor, because nothing else reads old ones before it."""
    objective = algorithm.objective
    return (
        epochs == 1
        and not objective.corrections
        and not estimator_reads_anchor(algorithm)
        and algorithm.scope is not Scope.GROUP
        and "values" not in needs(algorithm)
    )


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
) -> Tables:
    """Fill in old log-probs ('recompute' or 'sampler'), reference log-probs and old values.

    `silent` [B] are rows without any signal, which nothing needs to know about.
    """
    batch = tables.batch
    packs = [pack for update in updates if update.epoch == 0 for pack in update.packs]
    later = [pack for update in updates if update.epoch == 0 and update.index > 0 for pack in update.packs]
    values = policy.value_head is not None
    if choice == "sampler" and not values:
        tables = replace(tables, old_logprobs=tables.sampler_logprobs, anchored=torch.ones(len(batch), dtype=torch.bool))
    else:
        tables = _recomputed(tables, policy, _loud(later if skip_first and not values else packs, silent))
        if choice == "sampler":
            tables = replace(tables, old_logprobs=tables.sampler_logprobs)
    if reference is not None:
        found = _recomputed(tables, reference, packs)
        tables = replace(tables, ref_logprobs=found.old_logprobs)
    return tables


def _loud(packs: Sequence[Tensor], silent: Tensor | None) -> list[Tensor]:
    kept = packs if silent is None else [pack[~silent[pack]] for pack in packs]
    return [pack for pack in kept if len(pack)]


def _recomputed(tables: Tables, policy: Policy | Reference, packs: Sequence[Tensor]) -> Tables:
    batch, device = tables.batch, tables.device
    old = torch.zeros(batch.tokens.shape, dtype=_logprob_dtype(policy), device=device)
    values = torch.zeros_like(old) if isinstance(policy, Policy) and policy.value_head is not None else None
    anchored = torch.zeros(len(batch), dtype=torch.bool)
    for pack in packs:
        anchored[pack] = True
        rows = pack.to(device)
        channels = policy.score(tables.texts, pack)
        width = channels.logprobs.shape[1]
        old[rows, :width] = channels.logprobs
        if values is not None and channels.values is not None:
            values[rows, :width] = channels.values
    return replace(tables, old_logprobs=old, anchored=anchored, old_values=values)


def _logprob_dtype(scorer: Policy | Reference) -> torch.dtype:
    return scorer.dtype if isinstance(scorer, Policy) else scorer.policy.dtype
