"""The noise floor of log s: how far two scorings of one policy differ, measured on the run's own rollouts.

GSPO's published band is 3e-4; numerics alone may fill it. Two gaps are measured per response, as means over its tokens:
the trainer against itself in other packs, and the engine against the trainer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.mask import Mask
from legato.policy.policy import Policy
from legato.training.plan import packs
from legato.training.tables import Tables

ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """|log s| where s should be 1: the largest and the root mean square over responses."""

    packs_max: float
    packs_rms: float
    engine_max: float
    engine_rms: float
    engine_token_max: float
    """The largest |log-ratio| of a single token between engine and trainer."""
    token_ratio: bool
    """Whether the algorithm's ratio is of tokens, so that the band is theirs."""
    band: float | None
    """The narrower side of the algorithm's clip, as a distance of log s; None where it has none."""

    def metrics(self) -> dict[str, float]:
        return {
            "noise/packs_max": self.packs_max,
            "noise/packs_rms": self.packs_rms,
            "noise/engine_max": self.engine_max,
            "noise/engine_rms": self.engine_rms,
            "noise/engine_token_max": self.engine_token_max,
        }

    @property
    def sampler_is_safe(self) -> bool:
        """Whether the engine's log-probs may stand for the old policy: its noise is below a third of the band."""
        noise = self.engine_token_max if self.token_ratio else self.engine_max
        return self.band is not None and noise <= self.band / 3

    def sentence(self, anchor: str) -> str:
        against = "" if self.band is None else f"; the clip band is {self.band:.1e}"
        chosen = {"sampler": "the engine's log-probs are the anchor", "recompute": "old log-probs are recomputed"}[anchor]
        return (
            f"noise floor of log s: {self.packs_max:.1e} between packs, {self.engine_max:.1e} between engine and"
            f" trainer{against}: {chosen}"
        )


def band(algorithm: Algorithm) -> float | None:
    """The narrowest bound the trust region puts on the ratio."""
    found = [
        float(value)
        for part in algorithm.objective.trust
        for name in ("low", "high", "log_low", "log_high")
        if isinstance(value := getattr(part, name, None), float) and value > 0
    ]
    return min(found, default=None)


def probe(policy: Policy, algorithm: Algorithm, tables: Tables, tokens_per_pack: int) -> Floor:
    """Score the first responses twice, in packs of the run's size and each prompt's alone, and beside the engine's word."""
    batch, device = tables.batch, tables.device
    groups = sorted(set(batch.group[:ROWS].tolist()))
    rows = torch.isin(batch.group, torch.tensor(groups)).nonzero().squeeze(1)[:ROWS]
    together = _scored(policy, tables, [p[torch.isin(p, rows)] for p in packs(batch, groups, tokens_per_pack)])
    alone = _scored(policy, tables, [row.reshape(1) for row in rows])
    mask = Mask(batch.mask[rows].to(device), together.dtype)
    floor = {}
    for name, other in (("packs", alone[rows]), ("engine", tables.sampler_logprobs[rows])):
        difference = mask.difference(together[rows], other.to(together.dtype))
        gap = (mask.sum(difference) / mask.lengths.clamp(min=1)).abs()
        floor[f"{name}_token_max"] = float(difference.abs().max())
        floor[f"{name}_max"], floor[f"{name}_rms"] = float(gap.max()), float(gap.square().mean().sqrt())
    del floor["packs_token_max"]
    return Floor(**floor, token_ratio=algorithm.objective.ratio.level == "token", band=band(algorithm))


def _scored(policy: Policy, tables: Tables, parts: list[Tensor]) -> Tensor:
    device = tables.device
    table = torch.zeros(tables.batch.tokens.shape, dtype=policy.dtype, device=device)
    for rows in parts:
        if len(rows):
            placed = rows.to(device)
            found = policy.score(tables.texts, rows).logprobs
            table[placed, : found.shape[1]] = found
    return table
