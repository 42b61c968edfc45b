"""How the variance of log s depends on length, and what that says about the dependence of tokens.

Model: lw_it = mu_i + x_it; Var(log s_i) = tau^2 + sigma^2 kappa / L. sigma^2: token variance within a response; tau^2:
variance of the drift mu_i between responses; kappa = 1 + 2 sum_k (1 - k/L) r_k: integrated autocorrelation.
Gap = Var(log s) / (sigma^2 / L): 1 for independent tokens. A slope of log Var against log L near -1 with a gap above 1 is
short-range correlation; a flatter slope is drift or long memory, and then the spread does not fall as 1/L.
"""

import math

from torch import Tensor

from legato.core.mask import Mask
from legato.core.shapes import PerToken


def autoregressive_kappa(phi: float, length: int) -> float:
    """kappa of an AR(1) sequence with coefficient phi: (1+phi)/(1-phi) - 2 phi (1-phi^L) / (L (1-phi)^2)."""
    return (1 + phi) / (1 - phi) - 2 * phi * (1 - phi**length) / (length * (1 - phi) ** 2)


def explanations_of_gap(gap: float, length: int) -> dict[str, float]:
    """The parameter with which each explanation alone gives this gap at this length.

    phi of AR(1) (long sequences), rho of equal correlation, rho inside blocks of 16, the Hurst exponent of long memory,
    and tau^2 over sigma^2 of drift between responses.
    """
    return {
        "autoregressive_phi": (gap - 1) / (gap + 1),
        "equal_correlation": (gap - 1) / (length - 1),
        "block_correlation_16": (gap - 1) / 15,
        "hurst": 0.5 + math.log(gap) / (2 * math.log(length)),
        "drift_share": (gap - 1) / length,
    }


def log_slope(lengths: Tensor, variances: Tensor) -> float:
    """The least-squares slope of log variance against log length."""
    x, y = lengths.double().log(), variances.double().log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def integrated_autocorrelation(log_ratios: PerToken, tokens: Tensor, window: int = 40) -> tuple[float, float]:
    """kappa and r_1 estimated from token log-ratios, lags up to `window`.

    The mean of the whole batch is removed and not that of each response: the latter would hide drift between responses.
    """
    mask = Mask(tokens, log_ratios.dtype)
    centred = mask.select(log_ratios - mask.sum(log_ratios).sum() / mask.lengths.sum())
    variance = (centred.square().sum() / mask.lengths.sum()).double()
    length = float(mask.lengths.mean())
    kappa, first = 1.0, 0.0
    for lag in range(1, min(window, log_ratios.shape[1] - 1) + 1):
        pairs = (tokens[:, lag:] & tokens[:, :-lag]).sum()
        product = (centred[:, lag:] * centred[:, :-lag]).sum().double()
        correlation = float(product / pairs.clamp(min=1) / variance)
        first = correlation if lag == 1 else first
        kappa += 2 * (1 - lag / length) * correlation
    return kappa, first


def predicted_variance(sigma: float, tau: float, kappa: float, lengths: Tensor) -> Tensor:
    """tau^2 + sigma^2 kappa / L."""
    return tau**2 + sigma**2 * kappa / lengths
