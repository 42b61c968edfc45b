"""The ratio between the new policy and its anchor.

lw_t = logprobs_t - anchor_t. Token, turn and sequence ratios are one formula at three levels,
    log r = mean of lw over the segment,
and differ in what is differentiated:
    geometric          through r itself                                     (GRPO, GSPO, turn-GSPO, GMPO)
    geometric-carrier  sg[r] * pi / sg[pi]: the value of r, the gradient of each token's own log-prob  (GSPO-token)
    geometric-weight   sg[r] as a weight on log pi                          (CISPO, DPPO, MiniRL)
sg[.] is the stop-gradient. Limits on log-ratios are fields; beyond them the gradient is zero.
"""

import math
from typing import ClassVar, Literal

import torch

from legato.core.bounded import bounded
from legato.core.mask import Mask
from legato.core.parts import choice, number, part
from legato.core.scope import Scope
from legato.core.segments import LEVELS, Level, Segments
from legato.core.shapes import PerSequence, PerToken, Spread
from legato.core.signals import ANCHORS, Signals
from legato.objectives.slots import Context, Ratio

_LEVEL = "Over which segment log-ratios are averaged: a token, a turn or the whole response."
_ANCHOR = "'old': the trainer's recomputed log-probs; 'sampler': the engine's own (bypass, two policies)."
_TOKEN_LIMIT = "Largest |log-ratio| of a token; zero gradient beyond; None: no limit."


class _Anchored(Ratio):
    __slots__ = ()
    reads_anchor: ClassVar[bool] = True
    anchor: str

    def needs(self) -> tuple[str, ...]:
        return (ANCHORS[self.anchor],)


class _Geometric(_Anchored):
    __slots__ = ()
    limit: float | None

    def tokens(self, signals: Signals) -> PerToken:
        lower = None if self.limit is None else -self.limit
        return bounded(signals.log_ratio(self.anchor), lower, self.limit)

    def reduce(self, tokens: PerToken, context: Context) -> Spread:
        return context.segments.mean(tokens)


@part("ratio", "geometric")
class Geometric(_Geometric):
    """r = exp(mean of lw over the segment), differentiated through."""

    level: Level = choice(*LEVELS, default="sequence", says=_LEVEL)
    anchor: str = choice(*ANCHORS, default="old", says=_ANCHOR)
    limit: float | None = number(default=None, says=_TOKEN_LIMIT, above=0.0, optional=True)


@part("ratio", "geometric-carrier")
class GeometricCarrier(_Geometric):
    """sg[r] * pi / sg[pi]: r is detached, each token carries the gradient of its own log-prob."""

    gradient: ClassVar[Literal["carrier"]] = "carrier"
    level: Level = choice(*LEVELS, default="sequence", says=_LEVEL)
    anchor: str = choice(*ANCHORS, default="old", says=_ANCHOR)
    limit: float | None = number(default=None, says=_TOKEN_LIMIT, above=0.0, optional=True)


@part("ratio", "geometric-weight")
class GeometricWeight(_Geometric):
    """sg[r] * log pi: r is a detached weight. The value of the loss has no meaning, only its gradient."""

    gradient: ClassVar[Literal["weight"]] = "weight"
    level: Level = choice(*LEVELS, default="token", says=_LEVEL)
    anchor: str = choice(*ANCHORS, default="old", says=_ANCHOR)
    limit: float | None = number(default=20.0, says=_TOKEN_LIMIT, above=0.0, optional=True)


@part("ratio", "product")
class Product(_Anchored):
    """W = product of the token ratios of a response, differentiated through. Its spread grows with length."""

    level: Level = choice("sequence", default="sequence", says="The whole response.")
    anchor: str = choice(*ANCHORS, default="old", says=_ANCHOR)
    limit: float = number(default=20.0, says="Largest |log W|; zero gradient beyond.", above=0.0)

    def tokens(self, signals: Signals) -> PerToken:
        return signals.log_ratio(self.anchor)

    def reduce(self, tokens: PerToken, context: Context) -> Spread:
        return bounded(context.segments.sum(tokens), -self.limit, self.limit)


@part("ratio", "length-power")
class LengthPower(_Anchored):
    """r = exp(L^-exponent * sum of lw) of a response of L tokens: exponent 1 is the mean (GSPO), 0 the product."""

    level: Level = choice("sequence", default="sequence", says="The whole response.")
    exponent: float = number(
        default=0.5, says="How far the sum of log-ratios is divided by the length.", minimum=0.0, maximum=1.0
    )
    anchor: str = choice(*ANCHORS, default="old", says=_ANCHOR)
    limit: float = number(default=20.0, says="Largest |log r|; zero gradient beyond.", above=0.0)

    def tokens(self, signals: Signals) -> PerToken:
        return signals.log_ratio(self.anchor)

    def reduce(self, tokens: PerToken, context: Context) -> Spread:
        # A row without tokens has the length 0 and the sum 0.
        scale = context.segments.size().clamp(min=1.0).pow(-self.exponent)
        return bounded(scale * context.segments.sum(tokens), -self.limit, self.limit)


@part("ratio", "product-weight")
class ProductWeight(_Anchored):
    """sg[W] as a detached weight on log pi (VESPO)."""

    gradient: ClassVar[Literal["weight"]] = "weight"
    level: Level = choice("sequence", default="sequence", says="The whole response.")
    anchor: str = choice(*ANCHORS, default="old", says=_ANCHOR)
    limit: float = number(default=20.0, says="Largest |log-ratio| of a token, and largest log W.", above=0.0)
    floor: float = number(default=1e-8, says="Smallest W.", above=0.0)

    def tokens(self, signals: Signals) -> PerToken:
        return bounded(signals.log_ratio(self.anchor), -self.limit, self.limit)

    def reduce(self, tokens: PerToken, context: Context) -> Spread:
        return bounded(context.segments.sum(tokens), math.log(self.floor), self.limit)


@part("ratio", "group-expectation")
class GroupExpectation(Ratio):
    """p_i / E_g with p = exp(mean log-prob) and E_g = sum q^2 / sum q over the group, q = p of the anchor (GEPO).

    Differentiated through p. Not 1 on-policy: it compares a response with its siblings, not with itself.
    """

    scope: ClassVar[Scope] = Scope.GROUP
    needs_groups: ClassVar[bool] = True
    level: Level = choice("sequence", default="sequence", says="The whole response.")

    def needs(self) -> tuple[str, ...]:
        return ("old_logprobs",)

    def tokens(self, signals: Signals) -> PerToken:
        return signals.mask.select(signals.logprobs)

    def tables(self, signals: Signals) -> dict[str, PerSequence]:
        # In float64 for every dtype of the log-probs: counts must not depend on it.
        mask = Mask(signals.mask.tokens, torch.float64)
        segments = Segments(level="sequence", mask=mask, rollout=signals.rollout)
        likelihood = segments.mean(mask.select(signals.tensor("old_logprobs").double())).exp()
        present = (segments.size() > 0).double()
        if signals.rollout is not None:
            # All rows of a rollout hold the same likelihood: together they count once.
            rows = torch.bincount(signals.rollout, minlength=len(signals.rollout))[signals.rollout].unsqueeze(1)
            present = present / rows
        return {
            "likelihood": (present * likelihood).squeeze(1),
            "likelihood_squares": (present * likelihood * likelihood).squeeze(1),
        }

    def reduce(self, tokens: PerToken, context: Context) -> Spread:
        tables, group = context.counts.tables, context.signals.group
        assert group is not None
        total, squares = tables["likelihood"], tables["likelihood_squares"]
        # A group without tokens has no expectation; 0 stands in, and nothing reads it.
        log_expectation = torch.where(total > 0, squares.log() - total.log(), 0.0)[group].unsqueeze(1).to(tokens.dtype)
        return context.segments.mean(tokens) - log_expectation


@part("ratio", "none")
class NoRatio(Ratio):
    """No ratio: log pi with weight 1. Right on-policy only, one update per rollout."""

    gradient: ClassVar[Literal["weight"]] = "weight"
    level: Level = choice("token", default="token", says="Each token stands for itself.")

    def tokens(self, signals: Signals) -> PerToken:
        return torch.zeros_like(signals.mask.lengths).expand(signals.mask.tokens.shape)

    def reduce(self, tokens: PerToken, context: Context) -> Spread:
        return tokens[:, :1]
