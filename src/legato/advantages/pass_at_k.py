"""Advantages for pass@k: of n responses c are correct; what matters is that one of k is.

q(n, c, k) = C(n - c, k) / C(n, k) is the chance that k drawn responses are all wrong.
"""

import torch
from torch import Tensor

from legato.advantages.estimator import Estimate, Estimator, Scores
from legato.core.parts import integer, part
from legato.errors import InputError


def all_wrong(n: Tensor, c: Tensor, k: int) -> Tensor:
    """q(n, c, k) as a product of k factors; exactly 0 where fewer than k are wrong."""
    chance = torch.ones_like(n)
    for drawn in range(k):
        chance = chance * ((n - c - drawn).clamp(min=0) / (n - drawn).clamp(min=1))
    return chance


def _binary(scores: Scores, k: int, who: str) -> tuple[Tensor, Tensor, Tensor]:
    """Correctness, group size and number of correct ones."""
    correct = scores.rewards
    if not bool(((correct == 0) | (correct == 1)).all()):
        raise InputError(f"advantage '{who}' counts correct responses: rewards must be 0 or 1")
    n, c = scores.group_size(), scores.group_sum(correct)
    if bool((n < k).any()):
        raise InputError(f"advantage '{who}': k = {k} needs groups of at least {k}; the smallest has {int(n.min())}")
    return correct, n, c


@part("advantage", "pass-at-k")
class PassAtK(Estimator):
    """The group z-score of pass@k over all draws of k, in closed form (Pass@k Training). k = 1 is group-z.

    R = 1 - q(n, c, k), sd = sqrt(R (1 - R)); correct: (1 - R) / sd; wrong: (1 - R - q(n - 1, c, k - 1)) / sd.
    """

    k: int = integer(default=4, says="How many draws count as one attempt.", minimum=1)

    def estimate(self, scores: Scores) -> Estimate:
        correct, n, c = _binary(scores, self.k, self.name)
        missed = all_wrong(n, c, self.k)
        deviation = (missed * (1 - missed)).sqrt()
        wrong = missed - all_wrong(n - 1, c, self.k - 1)
        advantages = torch.where(correct == 1, missed, wrong) / deviation.clamp(min=1e-30)
        return Estimate(advantages=torch.where(deviation > 0, advantages, 0.0))


@part("advantage", "pass-at-k-reward")
class PassAtKReward(Estimator):
    """Rewards whose plain policy gradient is that of pass@k without bias (PKPO).

    correct: k / n; wrong: k / n * (1 - q(n - 1, c, k - 1)).
    """

    k: int = integer(default=4, says="How many draws count as one attempt.", minimum=1)

    def estimate(self, scores: Scores) -> Estimate:
        correct, n, c = _binary(scores, self.k, self.name)
        wrong = 1 - all_wrong(n - 1, c, self.k - 1)
        return Estimate(advantages=(self.k / n * torch.where(correct == 1, 1.0, wrong)))
