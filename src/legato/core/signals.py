"""The inputs of an objective: `[B, T]` tensors about the sampled tokens of an update, or of some of its rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.mask import Mask
from legato.core.segments import Level, Segments
from legato.core.shapes import PerToken, RowIds, Spread, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSignals:
    """The routers' choices at the positions that predict the tokens: M layers, K active experts.

    Only metrics read them; an objective reads `router_shift`.
    """

    experts: Tensor
    """[B, T, M, K]: the choice of the routers now."""
    entropy: PerToken
    """The entropy of the routers' probabilities, mean over the layers."""
    count: int
    """How many experts a layer has."""
    old: Tensor | None = None
    """[B, T, M, K]: the choice under the old policy."""
    sampler: Tensor | None = None
    """[B, T, M, K]: the choice of the engine."""
    trainer: Tensor | None = None
    """[B, T, M, K]: the trainer's choice with the weights the engine had."""
    sampler_known: Tensor | None = None
    """[B, T] bool: where the engine has a record."""
    old_known: Tensor | None = None
    """[B, T] bool: where `old` is known; None: everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The checked inputs of an objective (`core/checks.py`). Only `logprobs`, `entropy` and `values` may carry a gradient.

    An example, one group of two responses, the second with a tool token in the middle:
        mask           1 1 1     1 0 1
        logprobs      -.9 -.4 -.1    -1.2 nan -.3      (values at mask 0 are never read)
        old_logprobs  -.9 -.5 -.1    -1.1 nan -.3
        advantages     1. 1. 1.  or one column   -1.
        group          0             0
    """

    mask: Mask
    logprobs: PerToken
    """log pi_theta(token), at the rollout's own temperature."""
    advantages: Spread
    """[B, 1] per response or [B, T] per token; 0 outside the mask."""
    old_logprobs: PerToken | None = None
    """The anchor: log-probs of the trainer's policy before the first update."""
    sampler_logprobs: PerToken | None = None
    """Log-probs that the engine reported, before truncation."""
    kept_logmass: PerToken | None = None
    """log of the probability that top-p, top-k ... kept; the behaviour density is sampler_logprobs - kept_logmass."""
    ref_logprobs: PerToken | None = None
    entropy: PerToken | None = None
    values: PerToken | None = None
    old_values: PerToken | None = None
    returns: PerToken | None = None
    router_shift: PerToken | None = None
    """gamma in (0, 1], not floored."""
    router: RouterSignals | None = None
    uniform: PerToken | None = None
    """One number in [0, 1) per token for random selections, derived from (seed, update, row id) by the caller."""
    keep: Spread | None = None
    """0/1: rows or tokens whose policy term stays. Lengths and counts follow the mask, not this."""
    group: RowIds | None = None
    """[B], dense over the update from 0."""
    turn: TokenIds | None = None
    rollout: RowIds | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.logprobs.dtype

    def segments(self, level: Level) -> Segments:
        return Segments(level=level, mask=self.mask, turn=self.turn, rollout=self.rollout)

    def tensor(self, name: str) -> PerToken:
        """The signal of this name. It must be present: parts declare the signals they need, and callers check them."""
        value: PerToken | None = getattr(self, name)
        assert value is not None, f"{name} was not checked for before use"
        return value

    def log_ratio(self, anchor: str) -> PerToken:
        """logprobs minus those of an anchor ('old' or 'sampler'), 0 outside the mask."""
        return self.mask.difference(self.logprobs, self.tensor(ANCHORS[anchor]))

    def behaviour_log_ratio(self) -> PerToken:
        """log rho = old - (sampler - kept mass): how much likelier the anchor makes a token than the sampler did."""
        behaviour = self.tensor("sampler_logprobs")
        if self.kept_logmass is not None:
            behaviour = behaviour - self.kept_logmass
        return self.mask.difference(self.tensor("old_logprobs"), behaviour)


ANCHORS = {"old": "old_logprobs", "sampler": "sampler_logprobs"}
"""The signal that each anchor of a part reads."""
