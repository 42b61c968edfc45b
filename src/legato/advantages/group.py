"""Estimators that compare a response with its siblings.

Decided for all of them: a group of one has no baseline and gets 0; a group whose standard deviation is at most
1e-6 * max(1, |mean|) gets exactly 0, not rounding noise blown up by a small denominator.
"""

import torch
from torch import Tensor

from legato.advantages.estimator import Estimate, Estimator, Scores, divergence_needs, reward_with_divergence
from legato.core.parts import integer, number, numbers, part
from legato.core.shapes import PerSequence

FLAT = 1e-6
_DDOF = "0: population standard deviation, as papers write it; 1: Bessel's, as TRL and verl compute it."
_EPSILON = "Added to the standard deviation."
_REWARD_KL = "beta of the divergence from the reference inside the reward, k1 form; 0: none."


def centre(values: PerSequence, scores: Scores) -> PerSequence:
    """Minus the group mean; exactly 0 for a group of one and for a group that is flat."""
    size = scores.group_size()
    mean = scores.group_sum(values) / size
    centred = values - mean
    deviation = (scores.group_sum(centred.square()) / size).sqrt()
    flat = deviation <= FLAT * mean.abs().clamp(min=1.0)
    return torch.where(flat | (size < 2), 0.0, centred)


def standardise(values: PerSequence, scores: Scores, ddof: int, epsilon: float) -> PerSequence:
    """The z-score within each group."""
    centred = centre(values, scores)
    freedom = (scores.group_size() - ddof).clamp(min=1)
    deviation = (scores.group_sum(centred.square()) / freedom).sqrt()
    return torch.where(centred == 0, 0.0, centred / (deviation + epsilon))


def batch_standardise(values: PerSequence, weights: Tensor, ddof: int, epsilon: float) -> PerSequence:
    """The z-score over the batch, each response counted `weights` times; 0 where the batch is flat."""
    total = weights.sum()
    mean = (weights * values).sum() / total
    deviation = ((weights * (values - mean).square()).sum() / (total - ddof).clamp(min=1)).sqrt()
    if float(deviation) <= FLAT * max(1.0, abs(float(mean))):
        return torch.zeros_like(values)
    return (values - mean) / (deviation + epsilon)


@part("advantage", "group-z")
class GroupStandard(Estimator):
    """A = (r - mean of the group) / (std of the group + epsilon)."""

    ddof: int = integer(default=0, says=_DDOF, minimum=0, maximum=1)
    epsilon: float = number(default=1e-6, says=_EPSILON, minimum=0.0)

    def estimate(self, scores: Scores) -> Estimate:
        return Estimate(advantages=standardise(scores.rewards, scores, self.ddof, self.epsilon))


@part("advantage", "group-centre")
class GroupCentre(Estimator):
    """A = r - mean of the group (Dr. GRPO): no division, so hard and easy prompts are not blown up."""

    reward_kl: float = number(default=0.0, says=_REWARD_KL, minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return divergence_needs(self.reward_kl)

    def estimate(self, scores: Scores) -> Estimate:
        return Estimate(advantages=centre(reward_with_divergence(scores, self.reward_kl), scores))


@part("advantage", "leave-one-out")
class LeaveOneOut(Estimator):
    """A = r - mean of the other responses of the group = G / (G - 1) * (r - mean) (RLOO)."""

    reward_kl: float = number(default=0.0, says=_REWARD_KL, minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return divergence_needs(self.reward_kl)

    def estimate(self, scores: Scores) -> Estimate:
        size = scores.group_size()
        centred = centre(reward_with_divergence(scores, self.reward_kl), scores)
        return Estimate(advantages=(centred * size / (size - 1).clamp(min=1)))


@part("advantage", "group-centre-batch-std")
class GroupCentreBatchDeviation(Estimator):
    """A = (r - mean of the group) / (std of all rewards of the batch + epsilon) (Lite PPO)."""

    ddof: int = integer(default=0, says=_DDOF, minimum=0, maximum=1)
    epsilon: float = number(default=1e-4, says=_EPSILON, minimum=0.0)

    def estimate(self, scores: Scores) -> Estimate:
        spread = scores.rewards - scores.rewards.mean()
        deviation = (spread.square().sum() / max(1, len(spread) - self.ddof)).sqrt()
        centred = centre(scores.rewards, scores)
        return Estimate(advantages=torch.where(centred == 0, 0.0, centred / (deviation + self.epsilon)))


@part("advantage", "length-weighted")
class LengthWeighted(Estimator):
    """A = r - sum(L r) / sum(L) over the group: the baseline of least variance under a token sum (OPO)."""

    def needs(self) -> tuple[str, ...]:
        return ("mask",)

    def estimate(self, scores: Scores) -> Estimate:
        lengths = scores.lengths()
        weighted = scores.group_sum(lengths * scores.rewards) / scores.group_sum(lengths).clamp(min=1)
        flat = centre(scores.rewards, scores) == 0
        advantages = torch.where(flat & (scores.group_sum((~flat).double()) == 0), 0.0, scores.rewards - weighted)
        return Estimate(advantages=advantages)


@part("advantage", "gdpo")
class DecoupledRewards(Estimator):
    """Each component z-scored in its group, weighted, summed, then z-scored over the batch (GDPO).

    Summing first would let a component of large variance drown the others.
    """

    ddof: int = integer(default=1, says=_DDOF, minimum=0, maximum=1)
    epsilon: float = number(default=1e-6, says=_EPSILON, minimum=0.0)
    weights: tuple[float, ...] | None = numbers(default=None, says="One weight per component; None: all 1.")

    def needs(self) -> tuple[str, ...]:
        return ("components",)

    def estimate(self, scores: Scores) -> Estimate:
        assert scores.components is not None
        columns = scores.components.unbind(1)
        weights = self.weights or (1.0,) * len(columns)
        if len(weights) != len(columns):
            raise ValueError(f"advantage 'gdpo': {len(weights)} weights for {len(columns)} components; one each is needed")
        pairs = zip(weights, columns, strict=True)
        summed = sum((w * standardise(c, scores, self.ddof, self.epsilon) for w, c in pairs), torch.zeros(()))
        advantages = batch_standardise(summed, torch.ones_like(summed), self.ddof, self.epsilon)
        return Estimate(advantages=advantages)
