"""Trust regions that drop tokens or whole responses. The ratios of the others do not change."""

from dataclasses import replace
from typing import ClassVar

import torch

from legato.core.parts import check_order, choice, number, part
from legato.core.scope import Scope
from legato.core.shapes import PerToken
from legato.core.signals import ANCHORS
from legato.objectives.clips import leave_out
from legato.objectives.slots import Context, Region, Trust

_ANCHOR = "The policy drift is measured against: 'sampler' (the engine) or 'old' (the recomputed anchor)."


class _Anchored(Trust):
    __slots__ = ()
    reads_ratio: ClassVar[bool] = False
    anchor: str

    def needs(self) -> tuple[str, ...]:
        return (ANCHORS[self.anchor],)

    def _drift(self, context: Context) -> PerToken:
        """log pi_new - log pi_anchor per token, detached."""
        return context.signals.log_ratio(self.anchor).detach()


def _reject(region: Region, rejected: torch.Tensor) -> Region:
    """The region without the rejected responses."""
    remaining = (~rejected).to(region.log_ratio.dtype)
    return replace(region, kept=remaining if region.kept is None else region.kept * remaining)


@part("trust", "divergence-mask")
class DivergenceMask(_Anchored):
    """Drop a token that moves further the way A pushes once the divergence of its own probability exceeds threshold.

    p = pi_new, q = pi_anchor of the sampled token. total-variation: |p - q|; kl: q log(q/p) + (1-q) log((1-q)/(1-p)).
    Dropped iff divergence > threshold and (A > 0 and p > q, or A < 0 and p < q). (DPPO, binary forms.)
    """

    in_tables: ClassVar[tuple[str, ...]] = ("threshold",)
    divergence: str = choice("total-variation", "kl", default="total-variation", says="Which divergence.")
    threshold: float = number(default=0.15, says="Largest divergence (the paper: TV .15-.2, KL .05).", minimum=0.0)
    anchor: str = choice(*ANCHORS, default="sampler", says=_ANCHOR)

    def apply(self, region: Region, context: Context) -> Region:
        signals, drift = context.signals, self._drift(context)
        log_q = signals.mask.select(signals.tensor(ANCHORS[self.anchor]))
        q, p = log_q.exp(), (log_q + drift).exp()
        divergence = (p - q).abs()
        if self.divergence == "kl":
            smallest = torch.finfo(p.dtype).tiny
            rest_q, rest_p = (1 - q).clamp(min=smallest), (1 - p).clamp(min=smallest)
            divergence = rest_q * (rest_q.log() - rest_p.log()) - q * drift
        advantages = signals.advantages
        further = ((advantages > 0) & (drift > 0)) | ((advantages < 0) & (drift < 0))
        return leave_out(region, further & (divergence > self.threshold))


@part("trust", "opsm")
class OffPolicySequenceMask(_Anchored):
    """Drop a response with A < 0 whose length-normalised drift mean(log anchor - log new) exceeds threshold (V3.2)."""

    rejects: ClassVar[bool] = True
    in_tables: ClassVar[tuple[str, ...]] = ("threshold",)
    threshold: float = number(
        default=0.5, says="Largest mean drift in nats per token (the report does not print it).", minimum=0.0
    )
    anchor: str = choice(*ANCHORS, default="sampler", says=_ANCHOR)

    def apply(self, region: Region, context: Context) -> Region:
        lost = -context.sequences.mean(self._drift(context))
        return _reject(region, (context.signals.advantages < 0) & (lost > self.threshold))


@part("trust", "trm")
class TrustRegionMask(_Anchored):
    """Drop a response if the largest k2 or the mean k3 of KL(anchor || new) over its tokens is too large.

    d = log new - log anchor; k2 = d^2 / 2; k3 = exp(d) - 1 - d. The max criterion rejects more as responses get longer.
    """

    rejects: ClassVar[bool] = True
    max_threshold: float = number(default=0.05, says="Largest k2 of any token.", minimum=0.0, infinite=True)
    mean_threshold: float = number(default=0.001, says="Largest mean k3.", minimum=0.0, infinite=True)
    limit: float = number(default=20.0, says="Largest |d| before exp.", above=0.0)
    anchor: str = choice(*ANCHORS, default="sampler", says=_ANCHOR)

    def apply(self, region: Region, context: Context) -> Region:
        sequences, drift = context.sequences, self._drift(context).clamp(-self.limit, self.limit)
        # A rollout of several rows is rejected if any row has a token that is too far: tokens are counted over the rows.
        far = sequences.sum((drift.square() / 2 > self.max_threshold).to(drift.dtype)) > 0
        mean_k3 = sequences.mean(torch.expm1(drift) - drift)
        return _reject(region, far | (mean_k3 > self.mean_threshold))


def covariance(context: Context) -> PerToken:
    """(A - mean A)(log pi - mean log pi) per token, means over all tokens of the update; detached, 0 outside the mask."""
    signals, tokens = context.signals, context.counts.all.tokens
    advantages = signals.mask.select(signals.advantages)
    logprobs = signals.mask.select(signals.logprobs.detach())
    centred = [x - (x.sum(dtype=torch.float64) / tokens.clamp(min=1)).to(x.dtype) for x in (advantages, logprobs)]
    return signals.mask.select(centred[0] * centred[1])


def smallest_scores(score: PerToken, eligible: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[B, T] bool: the `count` eligible positions with the smallest score; equal scores in order of position."""
    flat = torch.where(eligible, score, torch.inf).reshape(-1)
    order = torch.argsort(flat, stable=True)
    early = torch.arange(len(flat), device=flat.device) < count
    return torch.zeros_like(early).scatter_(0, order, early).reshape(score.shape) & eligible


@part("trust", "clip-cov")
class ClipCovariance(Trust):
    """Leave out a few tokens, drawn at random from those whose covariance of A and log pi lies in (low, high).

    Drawn: floor(fraction * tokens), at least 1, among tokens not clipped already, by the smallest `uniform`.
    """

    scope: ClassVar[Scope] = Scope.UPDATE
    reads_ratio: ClassVar[bool] = False
    in_tables: ClassVar[tuple[str, ...]] = ("low", "high")
    fraction: float = number(default=2e-4, says="Share of all tokens that is left out.", minimum=0.0, maximum=1.0)
    low: float = number(default=1.0, says="Lower end of the covariance band.")
    high: float = number(default=5.0, says="Upper end of the covariance band.", infinite=True)
    selection: str = choice("random", "all", default="random", says="'random', or 'all' tokens in the band.")

    def __post_init__(self) -> None:
        check_order(self, "low", "high")

    def needs(self) -> tuple[str, ...]:
        return ("uniform",) if self.selection == "random" else ()

    def apply(self, region: Region, context: Context) -> Region:
        products, mask = covariance(context), context.signals.mask.tokens
        clipped = region.log_value.detach() != region.log_ratio.detach()
        eligible = mask & ~clipped & (products > self.low) & (products < self.high)
        if self.selection == "all":
            return leave_out(region, eligible)
        count = torch.floor(self.fraction * context.counts.all.tokens).clamp(min=1)
        return leave_out(region, smallest_scores(context.signals.tensor("uniform"), eligible, count))


@part("trust", "high-entropy")
class HighEntropy(Trust):
    """Only the tokens of highest policy entropy carry a policy gradient: those at or above the (1 - fraction) quantile."""

    scope: ClassVar[Scope] = Scope.UPDATE
    reads_ratio: ClassVar[bool] = False
    fraction: float = number(default=0.2, says="Share of tokens that stays in.", above=0.0, maximum=1.0)

    def needs(self) -> tuple[str, ...]:
        return ("entropy",)

    def apply(self, region: Region, context: Context) -> Region:
        mask = context.signals.mask.tokens
        entropy = context.signals.mask.select(context.signals.tensor("entropy").detach())
        ascending = torch.where(mask, entropy, torch.inf).reshape(-1).sort().values
        # Linear interpolation between order statistics, without reading the number of tokens from the device.
        position = (1 - self.fraction) * (context.counts.all.tokens - 1).clamp(min=0)
        below = position.floor().long()
        above = torch.minimum(below + 1, (context.counts.all.tokens - 1).clamp(min=0).long())
        share = (position - below).to(entropy.dtype)
        threshold = torch.lerp(ascending[below], ascending[above], share)
        return leave_out(region, mask & (entropy < threshold))
