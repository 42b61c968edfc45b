"""The inputs that all metrics share, computed once, and their reductions.

A response is a rollout: its first row with a token counts for it. Totals are summed over rows first and then in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.device import to_device
from legato.core.outcome import Outcome, Trace
from legato.core.segments import Segments
from legato.core.shapes import PerToken, Spread
from legato.core.signals import Signals
from legato.core.sums import Binned, Histogram, Mean
from legato.diagnostics.metrics.definitions import LENGTH_EDGES


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInputs:
    """Inputs shared by all topics of metrics."""

    signals: Signals
    outcome: Outcome
    sequences: Segments
    counted: Tensor
    """[B, 1] bool: the first row of each response that has a token."""
    lengths: Tensor
    """[B, 1]: the length of the response a row belongs to."""
    work: PerToken
    """[B, T] scratch buffer for the tensor a topic works on: allocating memory is the main cost on a CPU."""
    tokens: Tensor
    """Tokens of this call."""
    responses: Tensor
    """Responses of this call."""
    sign: Tensor
    """[B, 1]: the sign of each response's mean advantage."""

    @property
    def trace(self) -> Trace:
        return self.outcome.trace

    def token_total(self, values: Spread) -> Tensor:
        """Sum values over tokens: rows first, then in float64."""
        return self.signals.mask.sum(values).sum(dtype=torch.float64)

    def token_mean(self, values: Spread) -> Mean:
        return Mean(self.token_total(values), self.tokens)

    def response_mean(self, values: Tensor, among: Tensor | None = None) -> Mean:
        """Mean over responses of a [B, 1] value; `among` [B, 1] bool restricts which."""
        counted = self.counted if among is None else self.counted & among
        count = self.responses if among is None else counted.sum().double()
        return Mean(torch.where(counted, values, 0.0).sum(dtype=torch.float64), count)

    def by_length(self, values: Tensor) -> Binned:
        """Mean over responses of a [B, 1] value, per length bin."""
        edges = to_device(torch.tensor(LENGTH_EDGES, dtype=self.lengths.dtype), self.lengths.device)
        bins = torch.bucketize(self.lengths.squeeze(1), edges, right=True)
        member = self.counted & (bins.unsqueeze(1) == torch.arange(len(edges) + 1, device=bins.device))
        return Binned(torch.where(member, values, 0.0).sum(0, dtype=torch.float64), member.sum(0).double())

    def histogram(self, values: Tensor, among: Tensor | None = None) -> Histogram:
        return Histogram.from_values(values, self.counted if among is None else self.counted & among)


def metric_inputs(signals: Signals, outcome: Outcome) -> MetricInputs:
    """Compute the inputs that all metrics share."""
    sequences = signals.segments("sequence")
    lengths = sequences.size()
    counted = lengths > 0
    if signals.rollout is not None:
        rows = torch.arange(len(signals.rollout), device=lengths.device)
        first = torch.full_like(rows, len(rows)).scatter_reduce(0, signals.rollout, rows, "amin")[signals.rollout]
        counted = counted & (first == rows).unsqueeze(1)
    return MetricInputs(
        signals=signals,
        outcome=outcome,
        sequences=sequences,
        counted=counted,
        lengths=lengths,
        work=torch.empty_like(outcome.coefficients),
        tokens=signals.mask.lengths.sum(dtype=torch.float64),
        responses=counted.sum().double(),
        sign=sequences.mean(signals.advantages).sign(),
    )


def largest_magnitudes(values: PerToken) -> Tensor:
    """Return the largest |value| of each row, [B, 1], without allocating the absolute values."""
    return torch.maximum(values.amax(1, keepdim=True), -values.amin(1, keepdim=True))
