"""The share of responses that a band clips: prediction and calibration.

x_i = sgn(A_i) log s_i is clipped iff it exceeds the bound on its side: log(1 + high) where A > 0, -log(1 - low) where A < 0.
"""

import math
from statistics import NormalDist

import torch

from legato.core.shapes import PerSequence

_NORMAL = NormalDist()


def predicted_clip_fraction(low: float, high: float, deviation: float) -> float:
    """The clipped share if log s is normal with mean 0 and this standard deviation, whatever the sign of A.

    It tends to one half, not to one, as the band closes: a response that moved against its advantage is never clipped.
    """
    above = 1 - _NORMAL.cdf(math.log1p(high) / deviation)
    below = _NORMAL.cdf(math.log1p(-low) / deviation)
    return 0.5 * above + 0.5 * below


def calibrated_width(share: float, sigma: float, kappa: float, length: float) -> float:
    """The half-width that clips `share` of the responses that moved along: expm1(z sigma sqrt(kappa / L))."""
    return math.expm1(_NORMAL.inv_cdf(1 - share) * sigma * math.sqrt(kappa / length))


def quantile_bound(
    log_ratios: PerSequence,
    advantages: PerSequence,
    share: float,
    *,
    high_over_low: float = 1.0,
    lengths: PerSequence | None = None,
) -> float:
    """The bound b on the side A < 0 such that `share` of the responses with A != 0 exceed it.

    The bound on the side A > 0 is b * high_over_low. With `lengths`, c such that the band of a response is c / sqrt(L).
    """
    moved = advantages.sign() * log_ratios
    moved = torch.where(advantages > 0, moved / high_over_low, moved)
    if lengths is not None:
        moved = moved * lengths.sqrt()
    return float(torch.quantile(moved[advantages != 0].double(), 1 - share))


def widths(bound: float, high_over_low: float = 1.0) -> tuple[float, float]:
    """(low, high) distances from 1 of a bound on log s."""
    return -math.expm1(-bound), math.expm1(bound * high_over_low)


def product_range(low: float, high: float, length: int) -> tuple[float, float]:
    """The range of the product over tokens that a band on the geometric mean allows; as log10, since it overflows."""
    return length * math.log10(1 - low), length * math.log10(1 + high)
