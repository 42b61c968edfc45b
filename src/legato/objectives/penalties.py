"""Terms added to the loss: divergence from a reference, entropy, the value loss.

lr = ref - new. k1 = -lr, k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr. As numbers, k1 and k3 estimate KL(pi || ref). As losses
their gradients are other things: that of k1 is zero in expectation, that of k2 is the gradient of KL(pi || ref), that of
k3 is the gradient of KL(ref || pi). The straight-through and ratio-weighted forms give k3's value the right gradient.
"""

from typing import ClassVar

import torch

from legato.core.bounded import bounded
from legato.core.parts import choice, number, part
from legato.core.scope import Scope
from legato.core.shapes import PerToken, Spread
from legato.core.signals import Signals
from legato.core.sums import Sums
from legato.errors import InputError
from legato.objectives.masks import covariance, smallest_scores
from legato.objectives.slots import Context, PartState, Penalty

_LIMIT = "Largest |ref - new| before exp; zero gradient beyond."
_BETA = "Weight of the penalty."


def _k(estimator: str, gap: PerToken) -> PerToken:
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return gap.square() / 2
    return torch.expm1(gap) - gap


class _Divergence(Penalty):
    __slots__ = ()
    limit: float

    def needs(self) -> tuple[str, ...]:
        return ("ref_logprobs",)

    def _gap(self, signals: Signals) -> PerToken:
        return bounded(signals.mask.difference(signals.tensor("ref_logprobs"), signals.logprobs), -self.limit, self.limit)


@part("penalty", "kl")
class ReferenceDivergence(_Divergence):
    """beta * k, differentiated as it stands: with k3 (GRPO's) the gradient is that of the forward KL(ref || pi)."""

    beta: float = number(default=0.04, says=_BETA, minimum=0.0)
    estimator: str = choice("k1", "k2", "k3", default="k3", says="k1, k2 or k3.")
    limit: float = number(default=20.0, says=_LIMIT, above=0.0)

    def apply(self, context: Context) -> Spread:
        return self.beta * _k(self.estimator, self._gap(context.signals))


@part("penalty", "kl-straight-through")
class StraightThroughDivergence(_Divergence):
    """beta * (k2 + sg[k3 - k2]): the value of k3, the gradient of k2, which is that of KL(pi || ref) on-policy."""

    beta: float = number(default=0.04, says=_BETA, minimum=0.0)
    limit: float = number(default=20.0, says=_LIMIT, above=0.0)

    def apply(self, context: Context) -> Spread:
        gap = self._gap(context.signals)
        k2 = _k("k2", gap)
        return self.beta * (k2 + (_k("k3", gap) - k2).detach())


@part("penalty", "kl-ratio-weighted")
class RatioWeightedDivergence(_Divergence):
    """beta * w * k with the token ratio w = pi / pi_old differentiated: the gradient of KL(pi || ref), off-policy too."""

    beta: float = number(default=0.04, says=_BETA, minimum=0.0)
    estimator: str = choice("k1", "k2", "k3", default="k3", says="k1, k2 or k3.")
    limit: float = number(
        default=20.0, says="Largest |ref - new| and |new - old| before exp; zero gradient beyond.", above=0.0
    )

    def needs(self) -> tuple[str, ...]:
        return ("ref_logprobs", "old_logprobs")

    def apply(self, context: Context) -> Spread:
        signals = context.signals
        log_ratio = signals.log_ratio("old")
        ratio = bounded(log_ratio, -self.limit, self.limit).exp()
        return self.beta * ratio * _k(self.estimator, self._gap(signals))


@part("penalty", "kl-cov")
class CovarianceDivergence(Penalty):
    """beta * |new - old| on the floor(fraction * tokens) tokens with the largest covariance of A and log pi (KL-Cov)."""

    scope: ClassVar[Scope] = Scope.UPDATE
    fraction: float = number(default=2e-3, says="Share of tokens that is penalised.", minimum=0.0, maximum=1.0)
    beta: float = number(default=1.0, says=_BETA, minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return ("old_logprobs",)

    def apply(self, context: Context) -> Spread:
        signals = context.signals
        count = torch.floor(self.fraction * context.counts.all.tokens)
        chosen = smallest_scores(-covariance(context), signals.mask.tokens, count)
        drift = signals.log_ratio("old").abs()
        return self.beta * torch.where(chosen, drift, 0.0)


@part("penalty", "entropy")
class EntropyBonus(Penalty):
    """- coefficient * H of the full distribution; a token mean whatever the policy term uses."""

    channels: ClassVar[tuple[str, ...]] = ("entropy",)
    token_mean: ClassVar[bool] = True
    coefficient: float = number(default=0.001, says="Weight of the bonus.", minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return ("entropy",)

    def apply(self, context: Context) -> Spread:
        return -self.coefficient * context.signals.mask.select(context.signals.tensor("entropy"))


@part("penalty", "adaptive-entropy")
class AdaptiveEntropy(Penalty):
    """An entropy bonus whose coefficient rises by `step` while the entropy is at or below `target`, else falls.

    It is applied only while the entropy of the last update was at or below the target (Skywork-OR1).
    """

    channels: ClassVar[tuple[str, ...]] = ("entropy",)
    token_mean: ClassVar[bool] = True
    target: float = number(default=0.2, says="Entropy per token, in nats, to hold.", minimum=0.0)
    step: float = number(default=0.005, says="Change of the coefficient per update.", above=0.0)
    cap: float = number(default=1.0, says="Largest coefficient.", above=0.0)

    def needs(self) -> tuple[str, ...]:
        return ("entropy",)

    def initial(self) -> PartState:
        return {"coefficient": 0.0, "active": 0.0}

    def advance(self, state: PartState, sums: Sums, first: bool) -> PartState:
        if "entropy/mean" not in sums:
            raise InputError("penalty 'adaptive-entropy' follows entropy/mean; pass entropy= to loss, with metrics=True")
        low = sums["entropy/mean"].report()[""] <= self.target
        moved = float(state["coefficient"]) + (self.step if low else -self.step)
        return {"coefficient": min(max(moved, 0.0), self.cap), "active": float(low)}

    def apply(self, context: Context) -> Spread:
        state = context.state[self.name]
        coefficient = state["coefficient"] * state["active"]
        return -coefficient * context.signals.mask.select(context.signals.tensor("entropy"))


@part("penalty", "value")
class ValueLoss(Penalty):
    """coefficient * 0.5 * max((v - R)^2, (v_clip - R)^2), v_clip = v_old + clamp(v - v_old, -clip, clip); a token mean.

    R are the returns of the unwhitened advantages.
    """

    channels: ClassVar[tuple[str, ...]] = ("values",)
    token_mean: ClassVar[bool] = True
    clip: float = number(default=0.5, says="Largest change of a value from its old value.", above=0.0, infinite=True)
    coefficient: float = number(default=0.5, says="Weight of the value loss.", minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return ("values", "old_values", "returns")

    def apply(self, context: Context) -> Spread:
        select, tensor = context.signals.mask.select, context.signals.tensor
        values, old, returns = (select(tensor(name)) for name in ("values", "old_values", "returns"))
        moved = old + bounded(values - old, -self.clip, self.clip)
        worse = torch.maximum((values - returns).square(), (moved - returns).square())
        return self.coefficient * 0.5 * worse
