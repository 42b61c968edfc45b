"""Terms added to the policy loss. They follow the mask, not the selections; KL terms take the host's aggregation."""

import math

from tests.reference.aggregation import token_mean
from tests.reference.batch import Batch, Result, Rows, clamp
from tests.reference.ratios import LIMIT, token_log_ratios


def reference_log_ratio(batch: Batch, row: int, position: int, limit: float = LIMIT) -> tuple[float, float]:
    """lr = ref - new clamped to +-limit, and its derivative in new: -1, or 0 beyond."""
    raw = batch.ref[row][position] - batch.new[row][position]
    return clamp(raw, -limit, limit), -1.0 if abs(raw) <= limit else 0.0


def estimate(estimator: str, log_ratio: float) -> tuple[float, float]:
    """k1 = -lr, k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr, each with its derivative in lr."""
    if estimator == "k1":
        return -log_ratio, -1.0
    if estimator == "k2":
        return log_ratio * log_ratio / 2, log_ratio
    return math.exp(log_ratio) - 1 - log_ratio, math.exp(log_ratio) - 1


def kl(batch: Batch, weight: Rows, beta: float = 0.04, estimator: str = "k3") -> Result:
    """beta sum_it n_it k_it; k3: d k3 / d new = 1 - exp(lr)."""
    loss, gradient = 0.0, batch.zeros()
    for row, position in batch.tokens():
        log_ratio, inner = reference_log_ratio(batch, row, position)
        value, derivative = estimate(estimator, log_ratio)
        loss += beta * weight[row][position] * value
        gradient[row][position] = beta * weight[row][position] * derivative * inner
    return Result(loss, gradient)


def kl_straight_through(batch: Batch, weight: Rows, beta: float = 0.04) -> Result:
    """The value of k3, the gradient of k2: d / d new = -lr = log(pi / ref)."""
    return Result(kl(batch, weight, beta, "k3").loss, kl(batch, weight, beta, "k2").gradient)


def kl_ratio_weighted(batch: Batch, weight: Rows, beta: float = 0.04, estimator: str = "k3") -> Result:
    """beta sum_it n_it w_it k_it, w differentiated: d / d new = w k + w dk / d new."""
    log_policy = token_log_ratios(batch)
    loss, gradient = 0.0, batch.zeros()
    for row, position in batch.tokens():
        log_ratio, inner = reference_log_ratio(batch, row, position)
        value, derivative = estimate(estimator, log_ratio)
        ratio, live = math.exp(log_policy.value[row][position]), log_policy.live[row][position]
        loss += beta * weight[row][position] * ratio * value
        gradient[row][position] = beta * weight[row][position] * ratio * (value * live + derivative * inner)
    return Result(loss, gradient)


def kl_cov(batch: Batch, weight: Rows, selected: list[tuple[int, int]], beta: float = 1.0) -> Result:
    """beta sum over the selected tokens of n_it |new - old|; gradient sign(new - old)."""
    log_ratio = token_log_ratios(batch)
    loss, gradient = 0.0, batch.zeros()
    for row, position in selected:
        value = log_ratio.value[row][position]
        loss += beta * weight[row][position] * abs(value)
        sign = math.copysign(1.0, value) * log_ratio.live[row][position]
        gradient[row][position] = beta * weight[row][position] * sign
    return Result(loss, gradient)


def entropy_bonus(batch: Batch, coefficient: float = 0.001) -> tuple[float, Rows]:
    """-coefficient times the token mean of the entropy, and its derivative in each entropy (none in new)."""
    weight = token_mean(batch)
    loss, gradient = 0.0, batch.zeros()
    for row, position in batch.tokens():
        loss -= coefficient * weight[row][position] * batch.entropy[row][position]
        gradient[row][position] = -coefficient * weight[row][position]
    return loss, gradient


def value_loss(batch: Batch, clip: float = 0.5, coefficient: float = 0.5) -> tuple[float, Rows]:
    """coefficient * 0.5 * token mean of max((v - R)^2, (v_clip - R)^2), and its derivative in each value.

    v_clip = v_old + clamp(v - v_old, -clip, clip). Where the clipped error is the larger it is constant in v, unless
    v is inside the clip and the two are the same.
    """
    weight = token_mean(batch)
    loss, gradient = 0.0, batch.zeros()
    for row, position in batch.tokens():
        value, old = batch.values[row][position], batch.old_values[row][position]
        target = batch.returns[row][position]
        clipped_value = old + clamp(value - old, -clip, clip)
        loss += coefficient * 0.5 * weight[row][position] * max((value - target) ** 2, (clipped_value - target) ** 2)
        if (value - target) ** 2 >= (clipped_value - target) ** 2 or abs(value - old) <= clip:
            gradient[row][position] = coefficient * weight[row][position] * (value - target)
    return loss, gradient
