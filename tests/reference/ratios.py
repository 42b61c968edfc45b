"""Log-ratios of each token, and the limit beyond which they carry no gradient."""

import math
from typing import NamedTuple

from tests.reference.batch import Batch, Rows, clamp

LIMIT = 20.0


class LogRatio(NamedTuple):
    """log w_it, and whether it still moves with the new log-prob (False beyond the limit)."""

    value: Rows
    live: Rows


def token_log_ratios(batch: Batch, anchor: str = "old", limit: float | None = LIMIT) -> LogRatio:
    """lw_it = new - old (or new - roll), clamped to +-limit."""
    anchors = batch.old if anchor == "old" else batch.roll
    value, live = batch.zeros(), batch.zeros()
    for row, position in batch.tokens():
        raw = batch.new[row][position] - anchors[row][position]
        inside = limit is None or abs(raw) <= limit
        value[row][position] = raw if inside else math.copysign(limit, raw)
        live[row][position] = float(inside)
    return LogRatio(value, live)


def with_router_shift(batch: Batch, log_ratio: LogRatio, floor: float = 0.8) -> LogRatio:
    """lw + log max(gamma, floor): routing drift folded in before the clip. Gamma is detached, the limit came before."""
    value = batch.zeros()
    for row, position in batch.tokens():
        value[row][position] = log_ratio.value[row][position] + math.log(max(batch.gamma[row][position], floor))
    return LogRatio(value, log_ratio.live)


def router_shift_weights(batch: Batch, level: str, floor: float = 0.8) -> Rows:
    """exp(mean over the segment of log max(gamma, floor)): routing drift multiplied in after the clip."""
    weights = batch.zeros()
    for row, segment in batch.segments(level):
        shifts = [math.log(max(batch.gamma[row][position], floor)) for position in segment]
        for position in segment:
            weights[row][position] = math.exp(math.fsum(shifts) / len(segment))
    return weights


def router_shift(old_logits: Rows, new_logits: Rows, active: int) -> float:
    """gamma = exp(-mean over layers of the mean over old active experts of |log r_new - log r_old|)."""
    shifts = []
    for old, new in zip(old_logits, new_logits, strict=True):
        experts = sorted(range(len(old)), key=lambda expert: -old[expert])[:active]
        old_log, new_log = log_softmax(old), log_softmax(new)
        shifts.append(math.fsum(abs(new_log[expert] - old_log[expert]) for expert in experts) / active)
    return math.exp(-math.fsum(shifts) / len(shifts))


def log_softmax(logits: list[float]) -> list[float]:
    """log p_k = z_k - log sum exp z."""
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
    return [logit - total for logit in logits]


def log_product(batch: Batch, row: int, limit: float = LIMIT) -> tuple[float, bool]:
    """log W_i = sum_t lw_it clamped to +-limit, and whether it is inside."""
    total = math.fsum(batch.new[row][position] - batch.old[row][position] for position in batch.positions(row))
    return clamp(total, -limit, limit), abs(total) <= limit
