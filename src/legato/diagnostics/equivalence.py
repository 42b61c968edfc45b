"""The identity s = PPL_old / PPL_new = exp(H_old - H_new) of each response. A deviation is a fault of the computation.

H = -(1/L) sum log p of the sampled tokens, PPL = exp(H). It holds for any length and any shift. It does not hold for means
over a batch: the mean of s is not the quotient of mean perplexities. With H_new - H_old in the exponent the result is 1/s.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.mask import Mask
from legato.core.shapes import PerToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihoods:
    """Likelihoods of the n responses that have a token; [n] each."""

    lengths: Tensor
    log_s: Tensor
    """Mean over tokens of new - old."""
    entropy_old: Tensor
    """H_old: the cross-entropy of the sampled tokens, not the entropy of the whole distribution."""
    entropy_new: Tensor

    @property
    def s(self) -> Tensor:
        return self.log_s.exp()

    @property
    def perplexity_quotient(self) -> Tensor:
        return self.entropy_old.exp() / self.entropy_new.exp()

    @property
    def error(self) -> Tensor:
        """|s - PPL_old / PPL_new| / s"""
        return (self.s - self.perplexity_quotient).abs() / self.s


def likelihoods(new: PerToken, old: PerToken, tokens: Tensor) -> Likelihoods:
    """Compute likelihoods from [B, T] log-probs, in their precision."""
    mask = Mask(tokens, new.dtype)
    counted = (mask.lengths > 0).squeeze(1)
    lengths = mask.lengths[counted, 0]

    def mean(values: PerToken) -> Tensor:
        return mask.sum(values)[counted, 0] / lengths

    return Likelihoods(
        lengths=lengths, log_s=mean(mask.difference(new, old)), entropy_old=-mean(old), entropy_new=-mean(new)
    )


def implied_entropy(perplexity_change: float, entropy_change: float) -> float:
    """Return the H_old at which both relative changes agree: log(1 + dPPL) = dH H_old."""
    return math.log1p(perplexity_change) / entropy_change


def relative_error(measured: Tensor, exact: Tensor) -> float:
    """Return the largest |measured - exact| / exact."""
    return float(((measured.double() - exact.double()).abs() / exact.double()).max())


def quotient_of_means(values: Likelihoods) -> tuple[float, float]:
    """Return mean s and mean PPL_old / mean PPL_new, which differ."""
    old, new = (torch.exp(h).double().mean() for h in (values.entropy_old, values.entropy_new))
    return float(values.s.double().mean()), float(old / new)
