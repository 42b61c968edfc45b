"""The gap between sampler and trainer, per token and per response, and the effect of corrections on the weights.

le = old - behaviour per token and rho = exp(le); of a response P = exp(sum le), Geo = exp(mean le).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.mask import Mask
from legato.core.shapes import PerToken
from legato.core.sums import EffectiveSize

SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def distribution(values: Tensor) -> dict[str, float]:
    """Return mean, population standard deviation, least, greatest and quantiles (p01 ... p99) of values."""
    exact = values.double().flatten()
    if not len(exact):
        return {}
    # torch.quantile has a limit of 2^24 numbers; sorting has none.
    ascending = exact.sort().values
    summary = {"mean": float(exact.mean()), "deviation": float(exact.std(correction=0))}
    summary |= {"least": float(ascending[0]), "greatest": float(ascending[-1])}
    for share in SHARES:
        place = share * (len(ascending) - 1)
        below, above = ascending[math.floor(place)], ascending[math.ceil(place)]
        summary[f"p{round(100 * share):02d}"] = float(torch.lerp(below, above, place - math.floor(place)))
    return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """The gap of the n responses that have a token; [n] each."""

    lengths: Tensor
    log_product: Tensor
    """log P"""
    log_geometric: Tensor
    """log Geo = log(PPL_behaviour / PPL_old)"""
    k3: Tensor
    """The mean of rho - 1 - le over its tokens."""
    largest_k2: Tensor
    """The largest le^2 / 2 of a token."""


def per_response(gap: PerToken, mask: Mask) -> Responses:
    """Reduce token gaps [B, T], 0 outside the mask, to responses."""
    counted = (mask.lengths > 0).squeeze(1)
    lengths = mask.lengths.squeeze(1)[counted]
    total = gap.sum(1)[counted]
    return Responses(
        lengths=lengths,
        log_product=total,
        log_geometric=total / lengths,
        k3=(torch.expm1(gap) - gap).sum(1)[counted] / lengths,
        largest_k2=(gap.square() / 2).amax(1)[counted],
    )


def effective_share(weights: Tensor) -> float:
    """Return ESS / n of weights: (sum w)^2 / (n sum w^2)."""
    exact = weights.double()
    count = torch.tensor(float(exact.numel()), dtype=torch.float64)
    return EffectiveSize(exact.sum(), exact.square().sum(), count).report()[""]


def correction_effect(weights: Tensor, uncut: Tensor, exact: Tensor) -> dict[str, float]:
    """Return mean, share cut, effective share and bias of n corrected weights.

    weights   as the correction leaves them, 0 where it rejects
    uncut     the same weights before its cap or bounds; all ones where it only rejects
    exact     the importance weights of the same units: their mean is 1 but for chance; the mean of `weights` minus theirs
              is bias
    """
    return {
        "mean": float(weights.double().mean()),
        "cut": float((weights != uncut).double().mean()),
        "effective": effective_share(weights),
        "bias": float(weights.double().mean() - exact.double().mean()),
    }


def length_bins(lengths: Tensor, most: int = 4) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (shortest, longest, member [n] bool) for at most `most` bins of about equally many responses, short to long."""
    ascending = lengths.sort().values
    edges = sorted({int(ascending[len(ascending) * part // most]) for part in range(most)})
    for place, low in enumerate(edges):
        member = lengths >= low
        if place + 1 < len(edges):
            member &= lengths < edges[place + 1]
        yield low, int(lengths[member].max()), member
