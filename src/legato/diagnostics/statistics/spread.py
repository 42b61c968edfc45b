"""How Var(log s) falls with length in measured responses, and which explanation fits.

Responses are binned by length. Each bin also has the variance of independent tokens, sigma^2 / L. Three explanations with
one parameter each are fitted to the bins, by least squares of log variances weighted by the certainty of each bin:

    short range   sigma^2 kappa / L           slope -1, gap kappa at every length
    drift         tau^2 + sigma^2 / L         slope above -1, gap grows with L
    long memory   sigma^2 L^(2H - 2)          slope 2H - 2, gap L^(2H - 1)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.diagnostics.gaps import length_bins
from legato.diagnostics.statistics.variance import integrated_autocorrelation

FEWEST = 8
"""Responses a bin needs to count."""
TELLING = 4
"""How much lower a misfit must be to prefer its explanation: two standard errors of one parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Responses of similar length."""

    shortest: int
    longest: int
    length: float
    """Harmonic mean of their lengths."""
    responses: int
    variance: float
    """Of log s."""
    independent: float
    """sigma^2 / L"""
    distinct: int
    """Number of different values of log s: equal texts count once in the certainty."""
    kurtosis: float = 3.0
    """Of log s; 3 were it normal. A few tokens that moved far make it large, and the variance uncertain."""

    @property
    def relative_error(self) -> float:
        """The standard error of the variance, as a share of it."""
        return math.sqrt((max(self.kurtosis, 3.0) - 1) / max(1, self.distinct - 1))

    @property
    def gap(self) -> float:
        return self.variance / self.independent

    @property
    def effective_tokens(self) -> float:
        """Number of independent tokens with the same variance."""
        return self.length / self.gap

    @property
    def differs_from_one(self) -> bool:
        """Whether the gap is more than two standard errors away from 1."""
        return abs(self.gap - 1) > 2 * self.gap_error

    @property
    def gap_error(self) -> float:
        """Standard error of the gap."""
        return self.gap * self.relative_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One explanation."""

    name: str
    parameter: float
    """kappa, tau or H."""
    variances: tuple[float, ...]
    """The predicted variance of each bin."""
    misfit: float
    """Sum over bins of ((log measured - log predicted) / error)^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The variance of log s of a set of responses, by length."""

    sigma: float
    """Token deviation within a response."""
    tau: float
    """Of the drift between responses: from the fit of tau^2 + sigma^2 kappa / L, 0 where that would be negative."""
    kappa: float
    """Integrated autocorrelation of the tokens, drift included: the mean of the batch is removed, not of each response."""
    first: float
    """r_1"""
    slope: float
    """Of log Var against log L, weighted by the certainty of the bins."""
    slope_error: float
    gap: float
    """Pooled: the mean of Var(log s) over that of sigma^2 / L, weighted by responses."""
    bins: tuple[Bin, ...]
    fits: tuple[Fit, ...]
    """The best first."""

    @property
    def verdict(self) -> str:
        """In words, by slope and gap together."""
        if len(self.bins) < 3:
            return "too few lengths to tell explanations apart"
        best, second = self.fits[0], self.fits[1]
        # Tested over all bins together: each bin alone may be within its error of 1 while all lie above 1.
        gained = _misfit(self.bins, [each.independent for each in self.bins]) - best.misfit
        if gained < TELLING:
            return (
                "independent tokens cannot be ruled out: no explanation fits better than a gap of 1 by more than chance"
                f" (by {gained:.1f}; {TELLING} is telling); {sum(each.distinct for each in self.bins)} different responses"
                " are too few to tell what is this near"
            )
        word = f"{best.name} fits best"
        if self.gap < 1:
            word = "the gap is below 1: tokens of a response partly cancel, more than independent ones would"
            return f"{word}; slope {self.slope:.2f} (s.e. {self.slope_error:.2f})"
        if second.misfit - best.misfit < TELLING:
            word = f"{best.name} and {second.name} fit about equally well"
        falls = "may fall as 1/L" if abs(self.slope + 1) <= 2 * self.slope_error else "does not fall as 1/L"
        return f"{word}; slope {self.slope:.2f} (s.e. {self.slope_error:.2f}), so Var(log s) {falls}"


def spread(log_ratios: Tensor, tokens: Tensor, batch: Tensor, bins: int = 8) -> Spread:
    """Measure the spread of token log-ratios [n, T] with their mask.

    `batch` [n]: the update of each response; the mean of each update is removed.
    """
    lengths = tokens.sum(1)
    values = torch.where(tokens, log_ratios.double(), 0.0)
    log_s = values.sum(1) / lengths
    inside = torch.where(tokens, values - log_s.unsqueeze(1), 0.0).square().sum()
    sigma2 = float(inside / (lengths - 1).clamp(min=0).sum())
    means = torch.zeros(int(batch.max()) + 1, dtype=torch.float64)
    weights = torch.zeros_like(means).index_add_(0, batch, lengths.double())
    means = means.index_add_(0, batch, values.sum(1)) / weights.clamp(min=1)
    centred = torch.where(tokens, values - means[batch].unsqueeze(1), 0.0)
    kappa, first = integrated_autocorrelation(centred, tokens)
    moved = log_s - means[batch]
    # Share of a response that remains after removing a mean that contains it: small for long responses of small batches.
    left = 1 - lengths.double() / weights[batch]
    filled_bins = [
        _bin(low, high, lengths[member].double(), moved[member], left[member], sigma2)
        for low, high, member in length_bins(lengths, bins)
        if int(member.sum()) >= FEWEST
    ]
    filled_bins = [each for each in filled_bins if each.variance > 0]
    fits = fit_explanations(filled_bins, sigma2)
    slope, error = weighted_slope(filled_bins)
    between = intercept(filled_bins)
    total = sum(each.responses for each in filled_bins)
    mean = sum(each.responses * each.variance for each in filled_bins) / max(1, total)
    plain = sum(each.responses * each.independent for each in filled_bins) / max(1, total)
    return Spread(
        sigma=math.sqrt(sigma2),
        tau=math.sqrt(max(between, 0.0)),  # in this order: NaN stays NaN
        kappa=kappa,
        first=first,
        slope=slope,
        slope_error=error,
        gap=mean / plain if plain else math.nan,
        bins=tuple(filled_bins),
        fits=fits,
    )


def _bin(low: int, high: int, lengths: Tensor, log_s: Tensor, left: Tensor, sigma2: float) -> Bin:
    harmonic = 1 / float((1 / lengths).mean())
    return Bin(
        shortest=low,
        longest=high,
        length=harmonic,
        responses=len(lengths),
        variance=float(log_s.square().sum() / left.sum()) if float(left.sum()) > 0 else 0.0,
        independent=sigma2 / harmonic,
        distinct=len(set(log_s.tolist())),
        kurtosis=float(log_s.pow(4).mean() / log_s.square().mean().square().clamp(min=1e-300)),
    )


def fit_explanations(bins: Sequence[Bin], sigma2: float) -> tuple[Fit, ...]:
    """Fit the three explanations to the bins; the best first."""
    if not bins:
        return ()
    kinds: dict[str, tuple[Callable[[float, float], float], float, float]] = {
        "short-range correlation": (lambda kappa, n: sigma2 * kappa / n, 1e-3, 1e4),
        "drift between responses": (lambda tau2, n: tau2 + sigma2 / n, 1e-8 * sigma2, 1e4 * sigma2),
        "long memory": (lambda hurst, n: sigma2 * n ** (2 * hurst - 2), 0.5, 1.0),
    }
    fits = []
    for name, (predict, least, most) in kinds.items():
        value = _minimise(lambda p, predict=predict: _misfit(bins, [predict(p, b.length) for b in bins]), least, most)  # type: ignore[misc]
        predicted = tuple(predict(value, each.length) for each in bins)
        parameter = math.sqrt(value) if name.startswith("drift") else value
        fits.append(Fit(name=name, parameter=parameter, variances=predicted, misfit=_misfit(bins, predicted)))
    return tuple(sorted(fits, key=lambda fit: fit.misfit))


def _misfit(bins: Sequence[Bin], predicted: Sequence[float]) -> float:
    return sum(
        ((math.log(each.variance) - math.log(value)) / each.relative_error) ** 2
        for each, value in zip(bins, predicted, strict=True)
    )


def _minimise(cost: Callable[[float], float], low: float, high: float) -> float:
    """Minimise a cost over a positive number: a coarse grid, then golden section on its logarithm."""
    grid = [low * (high / low) ** (place / 60) for place in range(61)]
    best = min(range(61), key=lambda place: cost(grid[place]))
    left, right = math.log(grid[max(0, best - 1)]), math.log(grid[min(60, best + 1)])
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        a, b = right - golden * (right - left), left + golden * (right - left)
        left, right = (left, b) if cost(math.exp(a)) < cost(math.exp(b)) else (a, right)
    return math.exp((left + right) / 2)


def weighted_slope(bins: Sequence[Bin]) -> tuple[float, float]:
    """The slope of log variance against log length, and its standard error."""
    if len(bins) < 2:
        return math.nan, math.nan
    weights = [each.relative_error**-2 for each in bins]
    x, y = [math.log(each.length) for each in bins], [math.log(each.variance) for each in bins]
    total = sum(weights)
    middle = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    level = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    squares = sum(w * (a - middle) ** 2 for w, a in zip(weights, x, strict=True))
    if squares == 0:
        return math.nan, math.nan
    slope = sum(w * (a - middle) * (b - level) for w, a, b in zip(weights, x, y, strict=True)) / squares
    return slope, math.sqrt(1 / squares)


def intercept(bins: Sequence[Bin]) -> float:
    """tau^2 of the line tau^2 + c / L through the bins; each weighted by its responses over its variance squared."""
    if len(bins) < 2:
        return math.nan
    weights = [(each.relative_error * each.variance) ** -2 for each in bins]
    x, y = [1 / each.length for each in bins], [each.variance for each in bins]
    total = sum(weights)
    middle = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    level = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    squares = sum(w * (a - middle) ** 2 for w, a in zip(weights, x, strict=True))
    if squares == 0:
        return math.nan
    slope = sum(w * (a - middle) * (b - level) for w, a, b in zip(weights, x, y, strict=True)) / squares
    return level - slope * middle
