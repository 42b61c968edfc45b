"""Estimators that compare a response with its siblings. A group of one and a flat group get exactly 0 (`siblings.py`)."""

import torch
from torch import Tensor

from legato.advantages.estimator import Estimate, Estimator, Scores, divergence_needs, reward_with_divergence
from legato.advantages.siblings import FLAT, Siblings, compare
from legato.core.parts import integer, number, numbers, part
from legato.core.shapes import PerSequence
from legato.errors import InputError

DDOF = "0: population standard deviation, as papers write it; 1: Bessel's, as TRL and verl compute it."
EPSILON = "Added to the standard deviation."
REWARD_KL = "beta of the divergence from the reference inside the reward, k1 form; 0: none."


def siblings(values: PerSequence, scores: Scores) -> Siblings:
    """Each response compared with its group."""
    assert scores.group is not None
    return compare(values, scores.group)


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

    ddof: int = integer(default=0, says=DDOF, minimum=0, maximum=1)
    epsilon: float = number(default=1e-6, says=EPSILON, minimum=0.0)

    def estimate(self, scores: Scores) -> Estimate:
        return Estimate(advantages=siblings(scores.rewards, scores).standardise(self.ddof, self.epsilon))


@part("advantage", "group-centre")
class GroupCentre(Estimator):
    """A = r - mean of the group (Dr. GRPO): no division, so hard and easy prompts are not blown up."""

    reward_kl: float = number(default=0.0, says=REWARD_KL, minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return divergence_needs(self.reward_kl)

    def estimate(self, scores: Scores) -> Estimate:
        return Estimate(advantages=siblings(reward_with_divergence(scores, self.reward_kl), scores).centred)


@part("advantage", "leave-one-out")
class LeaveOneOut(Estimator):
    """A = r - mean of the other responses of the group = G / (G - 1) * (r - mean) (RLOO)."""

    reward_kl: float = number(default=0.0, says=REWARD_KL, minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return divergence_needs(self.reward_kl)

    def estimate(self, scores: Scores) -> Estimate:
        size = scores.group_size()
        centred = siblings(reward_with_divergence(scores, self.reward_kl), scores).centred
        return Estimate(advantages=(centred * size / (size - 1).clamp(min=1)))


@part("advantage", "group-centre-batch-std")
class GroupCentreBatchDeviation(Estimator):
    """A = (r - mean of the group) / (std of all rewards of the batch + epsilon) (Lite PPO)."""

    ddof: int = integer(default=0, says=DDOF, minimum=0, maximum=1)
    epsilon: float = number(default=1e-4, says=EPSILON, minimum=0.0)

    def estimate(self, scores: Scores) -> Estimate:
        spread = scores.rewards - scores.rewards.mean()
        deviation = (spread.square().sum() / max(1, len(spread) - self.ddof)).sqrt()
        centred = siblings(scores.rewards, scores).centred
        return Estimate(advantages=torch.where(centred == 0, 0.0, centred / (deviation + self.epsilon)))


@part("advantage", "length-weighted")
class LengthWeighted(Estimator):
    """A = r - sum(L r) / sum(L) over the group: the baseline of least variance under a token sum (OPO)."""

    def needs(self) -> tuple[str, ...]:
        return ("mask",)

    def estimate(self, scores: Scores) -> Estimate:
        lengths = scores.lengths()
        weighted = scores.group_sum(lengths * scores.rewards) / scores.group_sum(lengths).clamp(min=1)
        beside = siblings(scores.rewards, scores)
        advantages = torch.where(beside.flat | (beside.count < 2), 0.0, scores.rewards - weighted)
        return Estimate(advantages=advantages)


@part("advantage", "gdpo")
class DecoupledRewards(Estimator):
    """Each component z-scored in its group, weighted, summed, then z-scored over the batch (GDPO).

    Summing first would let a component of large variance drown the others.
    """

    ddof: int = integer(default=1, says=DDOF, minimum=0, maximum=1)
    epsilon: float = number(default=1e-6, says=EPSILON, minimum=0.0)
    weights: tuple[float, ...] | None = numbers(default=None, says="One weight per component; None: all 1.")

    def needs(self) -> tuple[str, ...]:
        return ("components",)

    def estimate(self, scores: Scores) -> Estimate:
        assert scores.components is not None
        columns = scores.components.unbind(1)
        weights = self.weights or (1.0,) * len(columns)
        if len(weights) != len(columns):
            raise InputError(f"advantage 'gdpo': {len(weights)} weights for {len(columns)} components; one each is needed")
        pairs = zip(weights, columns, strict=True)
        summed = sum((w * self._standardise(c, scores) for w, c in pairs), torch.zeros(()))
        advantages = batch_standardise(summed, torch.ones_like(summed), self.ddof, self.epsilon)
        return Estimate(advantages=advantages)

    def _standardise(self, values: PerSequence, scores: Scores) -> PerSequence:
        """The z-score in each group. NaN, a component that does not apply, gets 0 and is left out of mean and deviation."""
        assert scores.group is not None
        applies = ~values.isnan()
        known = torch.where(applies, values, 0.0)
        return compare(known, scores.group, applies).standardise(self.ddof, self.epsilon)
