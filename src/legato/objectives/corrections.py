"""Corrections for a sampler that is not the anchor (train/inference mismatch, staleness).

le_t = old_t - behaviour_t and rho = exp(le). Each part reads rho at one level:
    match      mean of le over the segments of the ratio: per token beside a token ratio, length-normalised beside a
               sequence ratio, where a product over tokens would reject or explode with length
    token      le of each token
    sequence   mean of le over the response (geometric, length-normalised)
    product    sum of le over the response: unbiased, but its spread grows with length
Everything here is detached. Importance weights do not change the denominators, even where they are 0. Rejection returns
`keep`; the aggregate's `denominator` decides whether rejected tokens still count.
"""

import math
from functools import reduce
from typing import ClassVar

import torch

from legato.core.parts import check_order, choice, number, part
from legato.core.shapes import Spread
from legato.objectives.slots import Adjustment, Context, Correction

_LEVEL_WORDS = ("match", "token", "sequence", "product")
_LEVEL = "At which level rho is taken: that of the ratio, each token, the response (length-normalised), the product."
_LIMIT = "Largest |log rho| before exp."


class _Behaviour(Correction):
    __slots__ = ()

    def needs(self) -> tuple[str, ...]:
        return ("old_logprobs", "sampler_logprobs")


class _Weight(_Behaviour):
    __slots__ = ()
    weighs: ClassVar[bool] = True
    level: str
    limit: float

    def _rho(self, context: Context) -> Spread:
        gap = context.signals.behaviour_log_ratio()
        if self.level == "product":
            gap = context.sequences.sum(gap)
        elif self.level == "sequence":
            gap = context.sequences.mean(gap)
        elif self.level == "match":
            gap = context.segments.mean(gap)
        return gap.clamp(-self.limit, self.limit).exp()


@part("correction", "tis")
class TruncatedImportance(_Weight):
    """b = min(rho, cap): keeps every token, bounds its weight (TIS)."""

    cap: float = number(default=2.0, says="Largest weight.", above=0.0, infinite=True)
    level: str = choice(*_LEVEL_WORDS, default="match", says=_LEVEL)
    limit: float = number(default=20.0, says=_LIMIT, above=0.0)

    def apply(self, context: Context) -> Adjustment:
        return Adjustment(weight=self._rho(context).clamp(max=self.cap))


@part("correction", "mis")
class MaskedImportance(_Weight):
    """b = rho where rho <= cap, else 0 (MIS)."""

    cap: float = number(default=2.0, says="Largest weight that stays.", above=0.0, infinite=True)
    level: str = choice(*_LEVEL_WORDS, default="match", says=_LEVEL)
    limit: float = number(default=20.0, says=_LIMIT, above=0.0)

    def apply(self, context: Context) -> Adjustment:
        rho = self._rho(context)
        return Adjustment(weight=torch.where(rho <= self.cap, rho, 0.0))


@part("correction", "icepop")
class IcePop(_Weight):
    """b = rho where floor <= rho <= cap, else 0 (IcePop)."""

    floor: float = number(default=0.5, says="Smallest weight that stays.", minimum=0.0)
    cap: float = number(default=5.0, says="Largest weight that stays.", above=0.0, infinite=True)
    level: str = choice(*_LEVEL_WORDS, default="match", says=_LEVEL)
    limit: float = number(default=20.0, says=_LIMIT, above=0.0)

    def __post_init__(self) -> None:
        check_order(self, "floor", "cap")

    def apply(self, context: Context) -> Adjustment:
        rho = self._rho(context)
        return Adjustment(weight=torch.where((rho >= self.floor) & (rho <= self.cap), rho, 0.0))


@part("correction", "decoupled")
class Decoupled(_Weight):
    """b = rho, uncapped: the three-policy form of decoupled PPO."""

    level: str = choice(*_LEVEL_WORDS, default="match", says=_LEVEL)
    limit: float = number(default=20.0, says=_LIMIT, above=0.0)

    def apply(self, context: Context) -> Adjustment:
        return Adjustment(weight=self._rho(context))


@part("correction", "geo-rejection")
class GeometricRejection(_Behaviour):
    """Keep a response iff floor <= exp(mean le) <= cap. Length-invariant; a criterion, not a weight."""

    floor: float = number(default=0.999, says="Smallest geometric-mean rho that stays.", minimum=0.0)
    cap: float = number(default=1.001, says="Largest geometric-mean rho that stays.", above=0.0, infinite=True)

    def __post_init__(self) -> None:
        check_order(self, "floor", "cap")

    def apply(self, context: Context) -> Adjustment:
        gap = context.sequences.mean(context.signals.behaviour_log_ratio())
        lower = math.log(self.floor) if self.floor > 0 else -math.inf
        return Adjustment(keep=((gap >= lower) & (gap <= math.log(self.cap))).to(gap.dtype))


@part("correction", "k3-rejection")
class K3Rejection(_Behaviour):
    """Keep a response iff the mean of k3 = rho - 1 - log rho over its tokens is at most threshold."""

    threshold: float = number(default=0.01, says="Largest mean k3.", minimum=0.0)
    limit: float = number(default=20.0, says=_LIMIT, above=0.0)

    def apply(self, context: Context) -> Adjustment:
        gap = context.signals.behaviour_log_ratio().clamp(-self.limit, self.limit)
        mean_k3 = context.sequences.mean(torch.expm1(gap) - gap)
        return Adjustment(keep=(mean_k3 <= self.threshold).to(gap.dtype))


@part("correction", "veto")
class Veto(_Behaviour):
    """Drop a response if any of its tokens has rho below floor: the trainer all but excludes what was sampled."""

    floor: float = number(default=1e-4, says="Smallest rho of a token.", above=0.0)

    def apply(self, context: Context) -> Adjustment:
        gap = context.signals.behaviour_log_ratio()
        excluded = context.signals.mask.select((gap < math.log(self.floor)).to(gap.dtype))
        vetoed = context.sequences.sum(excluded) > 0
        return Adjustment(keep=(~vetoed).to(gap.dtype))


@part("correction", "router-shift")
class RouterShift(Correction):
    """gamma~ = sg[max(gamma, floor)] shrinks the ratio of tokens whose experts moved (RSPO), on any host with a ratio.

    before-clip (version 2 of the paper): log gamma~ is added to the token log-ratios, after their limit, before any clip.
    after-clip (version 1): gamma~, averaged like the ratio, multiplies what the trust region leaves. The power is +1 for
    both signs of A; printed forms with gamma^(sgn A) would amplify drifted tokens where A < 0.
    """

    reads_ratio: ClassVar[bool] = True
    floor: float = number(default=0.8, says="Smallest gamma.", above=0.0, maximum=1.0)
    placement: str = choice("before-clip", "after-clip", default="before-clip", says="Where gamma enters.")

    def needs(self) -> tuple[str, ...]:
        return ("router_shift",)

    def apply(self, context: Context) -> Adjustment:
        signals = context.signals
        log_gamma = signals.mask.select(signals.tensor("router_shift").clamp(min=self.floor).log())
        if self.placement == "before-clip":
            return Adjustment(log_shift=log_gamma)
        return Adjustment(weight=context.segments.mean(log_gamma).exp())


def multiply(left: Spread | None, right: Spread | None) -> Spread | None:
    """The product of two optional factors."""
    if left is None or right is None:
        return right if left is None else left
    return left * right


def combine(adjustments: list[Adjustment]) -> Adjustment:
    """One adjustment for all corrections of an objective: shifts add up, weights and keeps multiply."""
    shifts = [a.log_shift for a in adjustments if a.log_shift is not None]
    return Adjustment(
        log_shift=sum(shifts[1:], start=shifts[0]) if shifts else None,
        weight=reduce(multiply, [a.weight for a in adjustments], None),
        keep=reduce(multiply, [a.keep for a in adjustments], None),
    )
