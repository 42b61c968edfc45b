"""An advantage estimator of your own: rewards compared with the median of their group.

    legato train recipes/tiny.toml algorithm.advantage=examples/own_estimator.py:MedianCentre
    legato explain examples/own_estimator.py:MedianCentre

One response that earns far more than its siblings moves a mean, and does not move a median.
"""

import torch

from legato.parts import Estimate, Estimator, Scores, number, part


@part("advantage", "median-centre")
class MedianCentre(Estimator):
    """A = scale * (r - median of the group)."""

    scale: float = number(default=1.0, says="What every advantage is multiplied by.", above=0.0)

    def estimate(self, scores: Scores) -> Estimate:
        """`scores.rewards` [B] and `scores.group` [B] hold a whole step, before it is split into updates."""
        assert scores.group is not None
        median = torch.zeros_like(scores.rewards)
        for group in scores.group.unique():
            rows = scores.group == group
            median[rows] = scores.rewards[rows].quantile(0.5)
        return Estimate(advantages=self.scale * (scores.rewards - median))
