"""The synthetic study of correlation: slope and gap of each explanation on generated tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from legato.diagnostics.statistics.correlation import processes
from legato.diagnostics.statistics.variance import integrated_autocorrelation, log_slope

GAP, AT, SIGMA = 3.6, 512, 0.02
"""The published gap, the length at which every explanation has it, and the token deviation."""
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
ROWS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One explanation, over lengths."""

    name: str
    lengths: tuple[int, ...]
    expected_gaps: tuple[float, ...]
    gaps: tuple[float, ...]
    expected_slope: float
    slope: float
    kappa: float
    """Estimated from the tokens of length 512 within 40 lags."""
    first: float

    @property
    def variances(self) -> tuple[float, ...]:
        return tuple(gap * SIGMA**2 / length for gap, length in zip(self.gaps, self.lengths, strict=True))


def gap_error(rows: int) -> float:
    """The relative standard error of a variance over `rows` responses."""
    return float((2 / rows) ** 0.5)


def slope_error(rows: int, lengths: Sequence[int]) -> float:
    """Return the standard error of the slope of log variance over log length."""
    x = torch.tensor(lengths, dtype=torch.float64).log()
    return gap_error(rows) / float((x - x.mean()).square().sum().sqrt())


def study(rows: int = ROWS, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Simulated]:
    """Simulate every explanation at every length."""
    results = []
    sizes = torch.tensor(lengths, dtype=torch.float64)
    for process in processes(GAP, AT).values():
        generator = torch.Generator().manual_seed(seed)
        gaps, kappa, first = [], float("nan"), float("nan")
        for length in lengths:
            tokens = process.tokens(rows, length, SIGMA, generator)
            gaps.append(float(tokens.mean(1).var() / (SIGMA**2 / length)))
            if length == AT:
                kappa, first = integrated_autocorrelation(tokens, torch.ones_like(tokens, dtype=torch.bool))
        expected = [process.gap(length) for length in lengths]
        results.append(
            Simulated(
                name=process.name,
                lengths=tuple(lengths),
                expected_gaps=tuple(expected),
                gaps=tuple(gaps),
                expected_slope=log_slope(sizes, torch.tensor(expected) / sizes),
                slope=log_slope(sizes, torch.tensor(gaps) / sizes),
                kappa=kappa,
                first=first,
            )
        )
    return results
