"""Detached factors on log pi: what the weight-form members multiply the log-prob by."""

import math

from tests.reference.batch import Batch, Rows, clamp
from tests.reference.objectives import is_clipped
from tests.reference.ratios import LIMIT, token_log_ratios


def ones(batch: Batch) -> Rows:
    """REINFORCE: 1."""
    return [[1.0] * len(row) for row in batch.mask]


def capped_ratios(batch: Batch, cap: float, floor: float = 0.0, anchor: str = "old") -> Rows:
    """CISPO: clamp(w_it, floor, cap); never zero."""
    log_ratio = token_log_ratios(batch, anchor)
    factors = batch.zeros()
    for row, position in batch.tokens():
        factors[row][position] = clamp(math.exp(log_ratio.value[row][position]), floor, cap)
    return factors


def masked_ratios(batch: Batch, low: float = 0.2, high: float = 0.27) -> Rows:
    """MiniRL: w_it where PPO would not clip, else 0 (the behaviour weight min(rho, 5) is a correction)."""
    log_ratio = token_log_ratios(batch)
    factors = batch.zeros()
    for row, position in batch.tokens():
        ratio = math.exp(log_ratio.value[row][position])
        if not is_clipped(ratio, batch.advantages[row][position], low, high):
            factors[row][position] = ratio
    return factors


def kernel_weights(
    batch: Batch,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Rows:
    """VESPO: phi(W) = W^k exp(lambda (1 - W)), W the product ratio clamped to [1e-8, e^20], tokens in e^+-20."""
    log_ratio = token_log_ratios(batch)
    factors = batch.zeros()
    for row in batch.filled_rows():
        positions = batch.positions(row)
        total = math.fsum(log_ratio.value[row][position] for position in positions)
        log_product = clamp(total, math.log(1e-8), LIMIT)
        for position in positions:
            power, rate = positive if batch.advantages[row][position] >= 0 else negative
            factors[row][position] = math.exp(power * log_product + rate * (1 - math.exp(log_product)))
    return factors


def divergence_masked_ratios(
    batch: Batch,
    threshold: float = 0.15,
    cap: float = 20.0,
    divergence: str = "total-variation",
    anchor: str = "sampler",
) -> Rows:
    """DPPO: min(w, cap), 0 where the token moves as its advantage asks and its divergence exceeds the threshold."""
    anchors = batch.old if anchor == "old" else batch.roll
    log_ratio = token_log_ratios(batch, anchor)
    factors = batch.zeros()
    for row, position in batch.tokens():
        ratio = math.exp(log_ratio.value[row][position])
        advantage = batch.advantages[row][position]
        outward = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
        distance = binary_divergence(batch.new[row][position], anchors[row][position], divergence)
        factors[row][position] = 0.0 if outward and distance > threshold else min(ratio, cap)
    return factors


def binary_divergence(new: float, behaviour: float, divergence: str) -> float:
    """|p - q|, or q log(q / p) + (1 - q) log((1 - q) / (1 - p)): the sampled token against all others."""
    p, q = math.exp(new), math.exp(behaviour)
    if divergence == "total-variation":
        return abs(p - q)
    return q * (behaviour - new) + (1 - q) * (math.log1p(-q) - math.log1p(-p))
