"""The policy terms: from a ratio and a trust region to a loss and its gradient.

`weight` is n_it * b_it: what aggregation, behaviour correction and selections say of each token, none of it
differentiated. Every member reads  loss = -sum_it weight_it * J_it  and  d loss / d new_it = -weight_it * c_it * A_it,
c_it being the coefficient field given in each docstring. Where a segment shares one ratio its weights act through that
ratio together, so weight_it is then their mean over the segment.
"""

import math
from collections.abc import Callable

from tests.reference.batch import Batch, Result, Rows, clamp
from tests.reference.ratios import LIMIT, LogRatio, log_product


def clip_objective(ratio: float, advantage: float, low: float, high: float) -> float:
    """CLIP(r, A) = min(r A, clamp(r, 1 - low, 1 + high) A)."""
    return min(ratio * advantage, clamp(ratio, 1 - low, 1 + high) * advantage)


def is_clipped(ratio: float, advantage: float, low: float, high: float) -> bool:
    """Zero gradient: the ratio has already moved past the band in the direction the advantage asks for."""
    return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def clipped_tokens(
    batch: Batch, weight: Rows, log_ratio: LogRatio, low: float, high: float, dual_cap: float | None = None
) -> Result:
    """c_it = w_it 1[token not clipped] 1[not (A < 0 and w_it > dual_cap)]: PPO, GRPO and their kin."""
    loss, gradient = 0.0, batch.zeros()
    for row, position in batch.tokens():
        ratio = math.exp(log_ratio.value[row][position])
        advantage = batch.advantages[row][position]
        objective = clip_objective(ratio, advantage, low, high)
        coefficient = 0.0 if is_clipped(ratio, advantage, low, high) else ratio * log_ratio.live[row][position]
        if dual_cap is not None and advantage < 0 and ratio > dual_cap:
            objective, coefficient = dual_cap * advantage, 0.0
        loss -= weight[row][position] * objective
        gradient[row][position] = -weight[row][position] * coefficient * advantage
    return Result(loss, gradient)


def unclipped_tokens(batch: Batch, weight: Rows, log_ratio: LogRatio) -> Result:
    """c_it = w_it."""
    return clipped_tokens(batch, weight, log_ratio, math.inf, math.inf)


def clipped_segments(
    batch: Batch,
    weight: Rows,
    log_ratio: LogRatio,
    low: float,
    high: float,
    level: str = "sequence",
    reference_length: float | None = None,
    dual_cap: float | None = None,
) -> Result:
    """c_it = s_iu 1[segment u not clipped], log s_iu = mean of lw over the segment: GSPO, turn-GSPO, LUSPO.

    With a reference length the band is `low, high` times sqrt(reference_length / tokens of the segment).
    """
    loss, gradient = 0.0, batch.zeros()
    for row, segment in batch.segments(level):
        scale = 1.0 if reference_length is None else math.sqrt(reference_length / len(segment))
        ratio = math.exp(math.fsum(log_ratio.value[row][position] for position in segment) / len(segment))
        advantage = batch.advantages[row][segment[0]]
        total = math.fsum(weight[row][position] for position in segment)
        objective = clip_objective(ratio, advantage, scale * low, scale * high)
        coefficient = 0.0 if is_clipped(ratio, advantage, scale * low, scale * high) else ratio
        if dual_cap is not None and advantage < 0 and ratio > dual_cap:
            objective, coefficient = dual_cap * advantage, 0.0
        loss -= total * objective
        for position in segment:
            live = log_ratio.live[row][position]
            gradient[row][position] = -(total / len(segment)) * coefficient * live * advantage
    return Result(loss, gradient)


def carried_sequences(batch: Batch, weight: Rows, log_ratio: LogRatio, low: float, high: float) -> Result:
    """c_it = s_i 1[s_i not clipped by the sign of A_it]; s_i itself is detached: GSPO-token."""
    loss, gradient = 0.0, batch.zeros()
    for row in batch.filled_rows():
        positions = batch.positions(row)
        ratio = math.exp(math.fsum(log_ratio.value[row][position] for position in positions) / len(positions))
        for position in positions:
            advantage = batch.advantages[row][position]
            loss -= weight[row][position] * clip_objective(ratio, advantage, low, high)
            if not is_clipped(ratio, advantage, low, high):
                gradient[row][position] = -weight[row][position] * ratio * advantage
    return Result(loss, gradient)


def log_clipped_tokens_then_mean(
    batch: Batch, weight: Rows, log_ratio: LogRatio, log_low: float = 0.4, log_high: float = 0.4
) -> Result:
    """c_it = S_i 1[token not clipped], S_i = exp(mean of the log-ratios, each clipped one-sidedly first): GMPO."""
    loss, gradient = 0.0, batch.zeros()
    for row in batch.filled_rows():
        positions, advantage = batch.positions(row), batch.advantage(row)
        clipped = {}
        for position in positions:
            value = log_ratio.value[row][position]
            clamped = clamp(value, -log_low, log_high)
            clipped[position] = min(value, clamped) if advantage > 0 else max(value, clamped)
        ratio = math.exp(math.fsum(clipped.values()) / len(positions))
        total = math.fsum(weight[row][position] for position in positions)
        loss -= total * ratio * advantage
        for position in positions:
            if clipped[position] == log_ratio.value[row][position]:
                live = log_ratio.live[row][position]
                gradient[row][position] = -(total / len(positions)) * ratio * live * advantage
    return Result(loss, gradient)


def clipped_products(batch: Batch, weight: Rows, low: float, high: float) -> Result:
    """c_it = L_i W_i 1[sequence not clipped] on weights 1 / (N L_i), W_i the product of token ratios: seq-product."""
    return products(batch, weight, lambda length: (math.log(1 - low), math.log(1 + high)))


def length_fair_products(batch: Batch, weight: Rows, log_low: float, log_high: float) -> Result:
    """As the product ratio, log W_i clipped to [-log_low sqrt(L_i), log_high sqrt(L_i)]: FSPO."""
    return products(batch, weight, lambda length: (-log_low * math.sqrt(length), log_high * math.sqrt(length)))


def products(batch: Batch, weight: Rows, band: Callable[[int], tuple[float, float]]) -> Result:
    """J_i = min(W_i A_i, exp(clamp(log W_i, band)) A_i); d W_i / d new_it = W_i."""
    loss, gradient = 0.0, batch.zeros()
    for row in batch.filled_rows():
        positions, advantage = batch.positions(row), batch.advantage(row)
        log_ratio, live = log_product(batch, row)
        bottom, top = band(len(positions))
        total = math.fsum(weight[row][position] for position in positions)
        loss -= total * min(math.exp(log_ratio) * advantage, math.exp(clamp(log_ratio, bottom, top)) * advantage)
        clipped = (advantage > 0 and log_ratio > top) or (advantage < 0 and log_ratio < bottom)
        for position in positions:
            if live and not clipped:
                gradient[row][position] = -total * math.exp(log_ratio) * advantage
    return Result(loss, gradient)


def length_powers(batch: Batch, weight: Rows, exponent: float, low: float, high: float, limit: float = LIMIT) -> Result:
    """r_i = exp(L_i^-exponent sum_t lw_it), clipped to [1 - low, 1 + high]; d log r_i / d new_it = L_i^-exponent."""
    loss, gradient = 0.0, batch.zeros()
    for row in batch.filled_rows():
        positions, advantage = batch.positions(row), batch.advantage(row)
        scale = len(positions) ** -exponent
        raw = scale * math.fsum(batch.new[row][position] - batch.old[row][position] for position in positions)
        ratio = math.exp(clamp(raw, -limit, limit))
        total = math.fsum(weight[row][position] for position in positions)
        loss -= total * clip_objective(ratio, advantage, low, high)
        for position in positions:
            if abs(raw) <= limit and not is_clipped(ratio, advantage, low, high):
                gradient[row][position] = -total * scale * ratio * advantage
    return Result(loss, gradient)


def group_expectation(batch: Batch, weight: Rows, low: float, high: float) -> Result:
    """c_it = (p_i / E_g) 1[sequence not clipped], p_i = exp(mean_t new), E_g = sum q^2 / sum q of the group: GEPO."""
    loss, gradient = 0.0, batch.zeros()
    expectations = expected_likelihoods(batch)
    for row in batch.filled_rows():
        positions, advantage = batch.positions(row), batch.advantage(row)
        ratio = likelihood(batch.new[row], positions) / expectations[batch.group[row]]
        total = math.fsum(weight[row][position] for position in positions)
        loss -= total * clip_objective(ratio, advantage, low, high)
        for position in positions:
            if not is_clipped(ratio, advantage, low, high):
                gradient[row][position] = -(total / len(positions)) * ratio * advantage
    return Result(loss, gradient)


def expected_likelihoods(batch: Batch) -> dict[int, float]:
    """E_g = sum_j q_j^2 / sum_j q_j over the group, q_j = exp(mean_t old)."""
    likelihoods: dict[int, list[float]] = {}
    for row in batch.filled_rows():
        likelihoods.setdefault(batch.group[row], []).append(likelihood(batch.old[row], batch.positions(row)))
    return {group: math.fsum(q * q for q in all_q) / math.fsum(all_q) for group, all_q in likelihoods.items()}


def likelihood(log_probs: list[float], positions: list[int]) -> float:
    """exp of the mean log-prob."""
    return math.exp(math.fsum(log_probs[position] for position in positions) / len(positions))


def soft_gated_tokens(
    batch: Batch, weight: Rows, log_ratio: LogRatio, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Result:
    """J = (4 / tau) sigmoid(tau (w - 1)) A and c_it = w_it 4 p (1 - p), p the sigmoid: SAPO."""
    loss, gradient = 0.0, batch.zeros()
    for row, position in batch.tokens():
        advantage = batch.advantages[row][position]
        tau = tau_positive if advantage > 0 else tau_negative
        ratio = math.exp(log_ratio.value[row][position])
        gate, opposite = sigmoid(tau * (ratio - 1)), sigmoid(-tau * (ratio - 1))
        loss -= weight[row][position] * (4 / tau) * gate * advantage
        coefficient = ratio * 4 * gate * opposite * log_ratio.live[row][position]
        gradient[row][position] = -weight[row][position] * coefficient * advantage
    return Result(loss, gradient)


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def weighted_log_probs(batch: Batch, weight: Rows, factor: Rows) -> Result:
    """J_it = sg[factor_it] A_it new_it, so c_it = factor_it: REINFORCE (1), CISPO, VESPO, DPPO, MiniRL."""
    loss, gradient = 0.0, batch.zeros()
    for row, position in batch.tokens():
        coefficient = weight[row][position] * factor[row][position] * batch.advantages[row][position]
        loss -= coefficient * batch.new[row][position]
        gradient[row][position] = -coefficient
    return Result(loss, gradient)
