"""How old the weights were that sampled a step's responses, and what that alone does: by age, and by server.

The age (lag) of a token is the number of versions between the policy that is about to be trained and the one that sampled
it. In one step an age is a version, so figures by age are figures by version under keys that do not change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.mask import Mask
from legato.core.rollout import Group
from legato.objectives.slots import State
from legato.training.probe import measure_gap
from legato.training.tables import Tables

_LIMIT = 20.0
MOST_AGES = 8
"""Figures are recorded for so many ages and servers at most."""
LEAST_K3 = 1e-3
"""Servers are compared with no less than this: smaller gaps are rounding, and harm nothing."""


def staleness(algorithm: Algorithm, tables: Tables, groups: Sequence[Group], version: int, state: State) -> dict[str, float]:
    """Metrics of a step, from the tables with old log-probs; `version` is that of the policy before the updates."""
    batch = tables.batch
    mask, versions = batch.texts.mask, batch.version
    known = mask & (versions >= 0)
    if not bool(known.any()):
        return {}
    lag = torch.where(known, version - versions, 0)
    metrics = {"lag/mean": float(lag[known].double().mean()), "lag/max": float(lag[known].max())}
    if tables.old_logprobs is None or tables.anchored is None:
        return metrics
    scored = tables.anchored & (mask.sum(1) > 0)
    if not bool(scored.any()):
        return metrics
    gap = _Gap(algorithm, tables, state)
    metrics |= gap.measure(scored, "mismatch")
    oldest = lag.max(1).values
    ages = sorted(set(oldest[scored].tolist()))
    for age in ages[:MOST_AGES] if len(ages) > 1 else []:
        metrics |= gap.measure(scored & (oldest == age), f"mismatch/lag_{age}")
    # A rollout whose chat template broke it apart has several rows.
    members = [member.rollout for group in groups for member in group.members]
    servers = [rollout.server for rollout in members for _ in rollout.rows]
    rows_of = {
        server: rows
        for server in sorted({each for each in servers if each is not None})
        if bool((rows := scored & torch.tensor([each == server for each in servers])).any())
    }
    shown = list(rows_of)[:MOST_AGES]
    if len(rows_of) > 1:
        everyone = torch.stack(list(rows_of.values())).any(0)
        ratios = {name: gap.k3(rows) / max(gap.k3(everyone & ~rows), LEAST_K3) for name, rows in rows_of.items()}
        worst = max(ratios, key=lambda name: ratios[name])
        metrics["mismatch/server_ratio"] = ratios[worst]
        if worst not in shown:
            shown.append(worst)  # the warning refers to its metric
    for server in shown:
        metrics |= gap.measure(rows_of[server], f"mismatch/server/{server}")
    return metrics


class _Gap:
    """The gap between the old policy and the sampler."""

    def __init__(self, algorithm: Algorithm, tables: Tables, state: State) -> None:
        assert tables.old_logprobs is not None
        self.algorithm, self.state = algorithm, state
        self.tokens = tables.texts.mask
        self.turn = tables.batch.turn
        old, sampled = tables.old_logprobs.cpu().double(), tables.batch.sampler_logprobs.double()
        kept = tables.batch.kept_logmass
        self.gap = torch.where(self.tokens, old - sampled, 0.0)
        """Without truncation, as the anchor would have it."""
        self.behaviour_gap = self.gap if kept is None else torch.where(self.tokens, self.gap + kept.double(), 0.0)

    def k3(self, rows: Tensor) -> float:
        """The estimate k3 of the KL of some rows."""
        limited = self.behaviour_gap[rows].clamp(-_LIMIT, _LIMIT)
        return float((torch.expm1(limited) - limited)[self.tokens[rows]].mean())

    def measure(self, rows: Tensor, prefix: str) -> dict[str, float]:
        """k3 of some rows, and the share of them outside the band for the gap alone."""
        mask = Mask(self.tokens[rows], torch.float64)
        gap = self.gap[rows]
        metrics = {f"{prefix}/k3": self.k3(rows)}
        clipped = measure_gap(self.algorithm, mask, self.turn[rows], gap, self.state).clipped
        return metrics if clipped is None else {**metrics, f"{prefix}/clipped": clipped}
