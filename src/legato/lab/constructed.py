"""Constructed failure modes with known answers: plain functions of numbers, no model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from legato.diagnostics.statistics.clipping import calibrated_width, quantile_bound
from legato.diagnostics.statistics.correlation import processes

SHARE = 0.15
"""The share of responses a band is calibrated to clip, as published for GSPO."""
QUINTILES = (0.2909, 0.2046, 0.1488, 0.0819, 0.0232)
FAIR_QUINTILES = (0.1436, 0.1527, 0.1605, 0.1528, 0.1399)
"""Expected clip rates by length quintile, of one band and of a band c / sqrt(L)."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quintile:
    """A fifth of the responses, short to long."""

    shortest: int
    longest: int
    responses: int
    one_band: float
    """Clipped by the band that clips the share of all."""
    by_length: float
    """Clipped by the band c / sqrt(L) that clips the same share of all."""


def quintiles(log_s: Tensor, advantages: Tensor, lengths: Tensor, share: float = SHARE) -> list[Quintile]:
    """Return clip rates by length of two bands that clip the same share overall. Responses with A = 0 are left out."""
    moved = advantages != 0
    log_s, advantages, lengths = log_s[moved].double(), advantages[moved].double(), lengths[moved].double()
    signed = advantages.sign() * log_s
    one = signed > quantile_bound(log_s, advantages, share)
    fair = signed * lengths.sqrt() > quantile_bound(log_s, advantages, share, lengths=lengths)
    order = lengths.argsort(stable=True)
    return [
        Quintile(
            shortest=int(lengths[part].min()),
            longest=int(lengths[part].max()),
            responses=len(part),
            one_band=float(one[part].double().mean()),
            by_length=float(fair[part].double().mean()),
        )
        for part in order.tensor_split(5)
        if len(part)
    ]


def heterogeneous_lengths(count: int = 20_000, deviation: float = 0.015, seed: int = 0) -> list[Quintile]:
    """Return clip rates for log-normal lengths (median 1,000, sigma 1) and independent tokens."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, count, generator=generator, dtype=torch.float64)
    lengths = (draw[0] + math.log(1000)).exp().clamp(21, 32000).round()
    return quintiles(deviation * draw[1] / lengths.sqrt(), draw[2].sign(), lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """A response of which a few tokens moved far and the others not at all."""

    length: int
    shifted: int
    shift: float

    @property
    def log_product(self) -> float:
        return self.shifted * self.shift

    @property
    def log_s(self) -> float:
        return self.log_product / self.length

    def inside(self, low: float, high: float) -> bool:
        return math.log1p(-low) <= self.log_s <= math.log1p(high)


HIDDEN = tuple(
    Hidden(length=length, shifted=shifted, shift=-5.0)
    for length, shifted in ((512, 1), (4096, 1), (4096, 8), (16384, 1), (32768, 1), (32768, 8))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlated:
    """The band that clips the share of independent tokens, on tokens that are not."""

    process: str
    gap: float
    expected: float
    """1 - Phi(z / sqrt(gap))"""
    clipped: float


def correlated_tokens(rows: int = 4000, length: int = 512, gap: float = 3.6, sigma: float = 0.02) -> list[Correlated]:
    """Measure clipping under each kind of correlation with the same gap. All clip alike: only Var(log s) matters."""
    bound = math.log1p(calibrated_width(SHARE, sigma, 1.0, length))
    results = []
    for process in processes(gap, length).values():
        generator = torch.Generator().manual_seed(0)
        log_s = process.tokens(rows, length, sigma, generator).mean(1)
        sign = torch.randn(rows, generator=generator, dtype=torch.float64).sign()
        actual = process.gap(length)
        expected = 1 - _NORMAL.cdf(_NORMAL.inv_cdf(1 - SHARE) / math.sqrt(actual))
        clipped = float((sign * log_s > bound).double().mean())
        results.append(Correlated(process=process.name, gap=actual, expected=expected, clipped=clipped))
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class Heavy:
    """Tokens from Student's t with three degrees of freedom, scaled to the variance of normal ones."""

    length: int
    gap: float
    """Var(log s) / (sigma^2 / L): heavy tails alone leave it at 1."""
    beyond: float
    """Share of |log s| beyond four standard deviations; normal: 6.3e-5."""
    quantile: float
    """The 99.9 % quantile of |log s| in standard deviations; normal: 3.29."""


NORMAL_BEYOND = 2 * (1 - _NORMAL.cdf(4.0))
NORMAL_QUANTILE = _NORMAL.inv_cdf(0.9995)


def heavy_tails(
    rows: int = 40_000, lengths: Sequence[int] = (4, 16, 64, 256), sigma: float = 0.02, seed: int = 0
) -> list[Heavy]:
    """Measure log s of heavy-tailed tokens at several lengths. The variance itself scatters much."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for length in lengths:
        log_s = torch.cat([student(2000, length, generator).mean(1) for _ in range(rows // 2000)]) * sigma
        deviation = sigma / math.sqrt(length)
        size = log_s.abs() / deviation
        results.append(
            Heavy(
                length=length,
                gap=float(log_s.var() / deviation**2),
                beyond=float((size > 4).double().mean()),
                quantile=float(torch.quantile(size, 0.999)),
            )
        )
    return results


def student(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw t(3) values with variance 1, [rows, length]: a normal over the root of a chi-square of three degrees."""
    draws = torch.randn(4, rows, length, generator=generator, dtype=torch.float64)
    return draws[0] / draws[1:].square().sum(0).sqrt()
