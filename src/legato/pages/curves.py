"""Turns records into curves: moving averages with bands, thinning, histograms on common bins."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from legato.pages.summary import Record, number

MOST_POINTS = 1200
"""Most points of a curve, so that the report of a long run stays small."""

_WIDEST_WINDOW = 100
_FEWEST_AVERAGED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A quantity over steps with its moving average and the middle 80 % of the same window."""

    steps: list[float]
    values: list[float]
    average: list[float]
    low: list[float]
    high: list[float]
    window: int


def points(records: Sequence[Record], key: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of a key, where the value is a finite number."""
    pairs = [(number(record, "step"), number(record, key)) for record in records]
    known = [(step, value) for step, value in pairs if step is not None and value is not None]
    return [step for step, _ in known], [value for _, value in known]


def curve(records: Sequence[Record], key: str) -> Curve | None:
    """Return the curve of a key; None if no step has it."""
    steps, values = points(records, key)
    if not steps:
        return None
    window = min(_WIDEST_WINDOW, max(5, len(values) // 20)) | 1 if len(values) >= _FEWEST_AVERAGED else 1
    shown = thin(len(steps))
    average, low, high = [], [], []
    for index in shown:
        near = sorted(values[max(0, index - window // 2) : index + window // 2 + 1])
        average.append(round_six(math.fsum(near) / len(near)))
        low.append(round_six(quantile(near, 0.1)))
        high.append(round_six(quantile(near, 0.9)))
    return Curve(
        steps=[steps[index] for index in shown],
        values=[round_six(values[index]) for index in shown],
        average=average,
        low=low,
        high=high,
        window=window,
    )


def thin(count: int, most: int = MOST_POINTS) -> list[int]:
    """Return indices of at most `most` of `count` points, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def chunks(steps: Sequence[float], values: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """Average neighbours into at most `most` points, each at its first step."""
    size = max(1, math.ceil(len(values) / most))
    starts = range(0, len(values), size)
    means = [math.fsum(values[at : at + size]) / len(values[at : at + size]) for at in starts]
    return [steps[at] for at in starts], [round_six(mean) for mean in means]


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, with linear interpolation."""
    place = share * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)


def round_six(value: float) -> float:
    """Round to six significant digits, to keep pages small."""
    return float(f"{value:.6g}")


@dataclass(frozen=True, slots=True)
class Bins:
    """A histogram with any edges."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def read(cls, stored: Any) -> "Bins | None":
        """Read a histogram from a record; None if it is malformed or empty."""
        if not isinstance(stored, Mapping):
            return None
        edges, counts = stored.get("edges"), stored.get("counts")
        if not (isinstance(edges, list) and isinstance(counts, list) and len(edges) == len(counts) + 1):
            return None
        numbers = [*edges, *counts]
        if any(isinstance(x, bool) or not isinstance(x, int | float) or not math.isfinite(x) for x in numbers):
            return None
        ordered = all(lower < upper for lower, upper in pairwise(edges)) and min(counts, default=-1) >= 0
        return cls(tuple(map(float, edges)), tuple(map(float, counts))) if ordered and sum(counts) > 0 else None

    def below(self, value: float) -> float:
        """Return the share below `value`, taking each bin as evenly filled."""
        total = 0.0
        for (lower, upper), count in zip(pairwise(self.edges), self.counts, strict=True):
            total += count * min(1.0, max(0.0, (value - lower) / (upper - lower)))
        return total / sum(self.counts)

    def edge_at(self, share: float) -> tuple[float, float]:
        """Return the edges of the bin in which the quantile `share` lies."""
        total, target = 0.0, share * sum(self.counts)
        for (lower, upper), count in zip(pairwise(self.edges), self.counts, strict=True):
            total += count
            if count and total >= target:
                return lower, upper
        return self.edges[-2], self.edges[-1]


def rebin(histograms: Sequence[Bins], number_of_bins: int) -> tuple[list[float], list[list[float]]]:
    """Return equal bins over nearly all values, and the share of each histogram in them.

    Stored edges may be logarithmic: drawn as they are, the bins beside 0 would be invisible.
    """
    low = min(each.edge_at(0.005)[0] for each in histograms)
    high = max(each.edge_at(0.995)[1] for each in histograms)
    edges = [low + (high - low) * index / number_of_bins for index in range(number_of_bins + 1)]
    shares = []
    for each in histograms:
        cumulative = [each.below(edge) for edge in edges]
        shares.append([round_six(upper - lower) for lower, upper in pairwise(cumulative)])
    return edges, shares
