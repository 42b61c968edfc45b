"""Estimators normalised over the whole batch (REINFORCE++)."""

import torch
from torch import Tensor

from legato.advantages.estimator import Estimate, Estimator, Scores, divergence_needs, reward_with_divergence
from legato.advantages.group import DDOF, EPSILON, REWARD_KL, batch_standardise, siblings
from legato.core.parts import choice, integer, number, part

_UNIT = "'sequence': a response counts once; 'token': as often as it has tokens (then a flat group need not get 0)."


class _BatchNormalised(Estimator):
    __slots__ = ()
    unit: str
    ddof: int
    epsilon: float
    reward_kl: float

    def needs(self) -> tuple[str, ...]:
        return tuple({*divergence_needs(self.reward_kl), *(("mask",) if self.unit == "token" else ())})

    def _standardise(self, values: Tensor, scores: Scores) -> Estimate:
        weights = scores.lengths() if self.unit == "token" else torch.ones_like(values)
        return Estimate(advantages=batch_standardise(values, weights, self.ddof, self.epsilon))


@part("advantage", "batch-z")
class BatchStandard(_BatchNormalised):
    """A = z-score of the reward over the whole batch; no group baseline (REINFORCE++)."""

    needs_groups = False
    unit: str = choice("sequence", "token", default="sequence", says=_UNIT)
    ddof: int = integer(default=0, says=DDOF, minimum=0, maximum=1)
    epsilon: float = number(default=0.0, says=EPSILON, minimum=0.0)
    reward_kl: float = number(default=0.0, says=REWARD_KL, minimum=0.0)

    def estimate(self, scores: Scores) -> Estimate:
        return self._standardise(reward_with_divergence(scores, self.reward_kl), scores)


@part("advantage", "group-centre-batch-z")
class GroupCentreBatchStandard(_BatchNormalised):
    """A = z-score over the batch of (r - mean of the group) (REINFORCE++-baseline)."""

    unit: str = choice("sequence", "token", default="sequence", says=_UNIT)
    ddof: int = integer(default=0, says=DDOF, minimum=0, maximum=1)
    epsilon: float = number(default=0.0, says=EPSILON, minimum=0.0)
    reward_kl: float = number(default=0.0, says=REWARD_KL, minimum=0.0)

    def estimate(self, scores: Scores) -> Estimate:
        return self._standardise(siblings(reward_with_divergence(scores, self.reward_kl), scores).centred, scores)
