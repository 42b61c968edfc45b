"""Behaviour corrections: weights b_it and rejections from rho = old / sampler. All of it detached.

Levels: rho of each token; its geometric mean over a turn or the sequence; its product over the sequence.
"""

import math
from collections.abc import Callable

from tests.reference.batch import Batch, Rows, clamp, mean
from tests.reference.ratios import LIMIT


def behaviour_log_ratios(batch: Batch, limit: float = LIMIT) -> Rows:
    """le_it = old - roll, roll being renormalised to the tokens that truncation left, clamped to +-limit."""
    log_ratios = batch.zeros()
    for row, position in batch.tokens():
        behaviour = batch.roll[row][position]
        if batch.kept_logmass is not None:
            behaviour -= batch.kept_logmass[row][position]
        log_ratios[row][position] = clamp(batch.old[row][position] - behaviour, -limit, limit)
    return log_ratios


def behaviour_ratios(batch: Batch, level: str) -> Rows:
    """rho_t, exp(mean le) over the segment, or exp(sum le) over the sequence, given to each token."""
    log_ratios, ratios = behaviour_log_ratios(batch), batch.zeros()
    for row, segment in batch.segments("sequence" if level == "product" else level):
        total = math.fsum(log_ratios[row][position] for position in segment)
        for position in segment:
            ratios[row][position] = math.exp(total if level == "product" else total / len(segment))
    return ratios


def truncated(batch: Batch, level: str, cap: float = 2.0) -> Rows:
    """TIS: min(rho, cap)."""
    return apply_to_ratios(batch, level, lambda rho: min(rho, cap))


def masked_above(batch: Batch, level: str, cap: float = 2.0) -> Rows:
    """MIS: rho 1[rho <= cap]."""
    return apply_to_ratios(batch, level, lambda rho: rho if rho <= cap else 0.0)


def masked_outside(batch: Batch, level: str, floor: float = 0.5, cap: float = 5.0) -> Rows:
    """IcePop: rho 1[floor <= rho <= cap]."""
    return apply_to_ratios(batch, level, lambda rho: rho if floor <= rho <= cap else 0.0)


def uncapped(batch: Batch, level: str) -> Rows:
    """Decoupled: rho."""
    return apply_to_ratios(batch, level, lambda rho: rho)


def apply_to_ratios(batch: Batch, level: str, action: Callable[[float], float]) -> Rows:
    """Apply the action to the ratio of each token's segment."""
    ratios, weights = behaviour_ratios(batch, level), batch.zeros()
    for row, position in batch.tokens():
        weights[row][position] = action(ratios[row][position])
    return weights


def geometric_survivors(batch: Batch, floor: float = 0.999, cap: float = 1.001) -> set[int]:
    """Rows with floor <= Geo_i <= cap, Geo_i the geometric mean of rho."""
    ratios = behaviour_ratios(batch, "sequence")
    return {row for row in batch.filled_rows() if floor <= ratios[row][batch.positions(row)[0]] <= cap}


def k3_survivors(batch: Batch, threshold: float = 0.01) -> set[int]:
    """Rows with mean_t k3 <= threshold, k3 = rho - 1 - log rho."""
    return {row for row in batch.filled_rows() if mean_k3(batch, row) <= threshold}


def mean_k3(batch: Batch, row: int) -> float:
    """mean_t (rho - 1 - log rho)."""
    log_ratios = behaviour_log_ratios(batch)[row]
    return mean([math.exp(log_ratios[t]) - 1 - log_ratios[t] for t in batch.positions(row)])


def veto_survivors(batch: Batch, floor: float = 1e-4) -> set[int]:
    """Rows without a token whose rho is below the floor."""
    log_ratios = behaviour_log_ratios(batch)
    return {
        row
        for row in batch.filled_rows()
        if all(math.exp(log_ratios[row][position]) >= floor for position in batch.positions(row))
    }


def keep_rows(batch: Batch, survivors: set[int]) -> Rows:
    """1 on the tokens of surviving rows, 0 elsewhere."""
    keep = batch.zeros()
    for row, position in batch.tokens():
        keep[row][position] = float(row in survivors)
    return keep
