"""Synthetic token log-ratios: five ways in which the tokens of a response can be dependent.

Each has the token variance sigma^2 and a closed form for its gap, Var(log s) / (sigma^2 / L). At one length all of them can
explain the same gap; they differ over length (`variance.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.diagnostics.statistics.variance import autoregressive_kappa, explanations_of_gap

BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One model of the dependence between the tokens of a response."""

    name: str
    gap: Callable[[int], float]
    """The gap of responses of a given length."""
    unit: Callable[[int, int, torch.Generator], Tensor]
    """[rows, length] of token deviation 1, float64."""

    def tokens(self, rows: int, length: int, sigma: float, generator: torch.Generator) -> Tensor:
        """Draw log-ratios [rows, length] with token deviation sigma."""
        return sigma * self.unit(rows, length, generator)


def processes(gap: float, length: int) -> dict[str, Process]:
    """Independent tokens, and each explanation with the parameter that gives `gap` at `length`."""
    parameters = explanations_of_gap(gap, length)
    phi, rho, block = parameters["autoregressive_phi"], parameters["equal_correlation"], parameters["block_correlation_16"]
    hurst, drift = parameters["hurst"], parameters["drift_share"]
    explanations = (
        Process(name="independent", gap=lambda n: 1.0, unit=_normal),
        Process(
            name="AR(1)", gap=lambda n: autoregressive_kappa(phi, n), unit=lambda r, n, g: _autoregressive(r, n, phi, g)
        ),
        Process(name="equicorrelated", gap=lambda n: 1 + (n - 1) * rho, unit=lambda r, n, g: _blocks(r, n, n, rho, g)),
        Process(
            name="blocks of 16", gap=lambda n: _block_gap(n, block), unit=lambda r, n, g: _blocks(r, n, BLOCK, block, g)
        ),
        Process(name="long memory", gap=lambda n: n ** (2 * hurst - 1), unit=lambda r, n, g: _fractional(r, n, hurst, g)),
        Process(
            name="random effect",
            gap=lambda n: 1 + n * drift,
            unit=lambda r, n, g: _normal(r, n, g) + math.sqrt(drift) * _normal(r, 1, g),
        ),
    )
    return {process.name: process for process in explanations}


def _normal(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, length, generator=generator, dtype=torch.float64)


def _autoregressive(rows: int, length: int, phi: float, generator: torch.Generator) -> Tensor:
    noise = _normal(length, rows, generator)
    noise[1:] *= math.sqrt(1 - phi**2)
    for place in range(1, length):
        noise[place] += phi * noise[place - 1]
    return noise.t()


def _blocks(rows: int, length: int, size: int, rho: float, generator: torch.Generator) -> Tensor:
    """Tokens of one block share a part of variance rho; a block as long as the response is equal correlation."""
    shared = _normal(rows, math.ceil(length / size), generator).repeat_interleave(size, 1)[:, :length]
    return math.sqrt(rho) * shared + math.sqrt(1 - rho) * _normal(rows, length, generator)


def _block_gap(length: int, rho: float) -> float:
    whole, rest = divmod(length, BLOCK)
    pairs = whole * BLOCK * (BLOCK - 1) + rest * (rest - 1)
    return 1 + rho * pairs / length


def _fractional(rows: int, length: int, hurst: float, generator: torch.Generator) -> Tensor:
    """Fractional Gaussian noise, exactly: the covariance as a circle of twice the length is diagonal under Fourier."""
    lag = torch.arange(length + 1, dtype=torch.float64)
    covariance = 0.5 * ((lag + 1) ** (2 * hurst) - 2 * lag ** (2 * hurst) + (lag - 1).abs() ** (2 * hurst))
    circle = torch.cat([covariance, covariance[1:-1].flip(0)])
    root = torch.fft.fft(circle).real.clamp(min=0).sqrt()
    parts = []
    for start in range(0, rows, 500):
        count = min(500, rows - start)
        noise = torch.complex(_normal(count, 2 * length, generator), _normal(count, 2 * length, generator))
        parts.append((torch.fft.fft(root * noise) / math.sqrt(2 * length)).real[:, :length])
    return torch.cat(parts)
