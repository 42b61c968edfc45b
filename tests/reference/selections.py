"""Rows and tokens that a trust region leaves out, and bounds it searches for. All of it detached."""

import math

from tests.reference.batch import Batch, Rows, mean
from tests.reference.objectives import is_clipped
from tests.reference.ratios import token_log_ratios


def off_policy_survivors(batch: Batch, threshold: float = 0.5, anchor: str = "sampler") -> set[int]:
    """OPSM: a row falls when A_i < 0 and mean_t (roll - new) > threshold."""
    anchors = batch.old if anchor == "old" else batch.roll
    survivors = set()
    for row in batch.filled_rows():
        drift = mean([anchors[row][position] - batch.new[row][position] for position in batch.positions(row)])
        if not (batch.advantage(row) < 0 and drift > threshold):
            survivors.add(row)
    return survivors


def trust_region_survivors(
    batch: Batch, max_threshold: float = 0.05, mean_threshold: float = 0.001, anchor: str = "sampler"
) -> set[int]:
    """TRM: a row falls when max_t k2 > max_threshold or mean_t k3 > mean_threshold, both between sampler and new."""
    log_ratio = token_log_ratios(batch, anchor)
    survivors = set()
    for row in batch.filled_rows():
        values = [log_ratio.value[row][position] for position in batch.positions(row)]
        largest = max(value * value / 2 for value in values)
        average = mean([math.exp(value) - 1 - value for value in values])
        if largest <= max_threshold and average <= mean_threshold:
            survivors.add(row)
    return survivors


def covariances(batch: Batch) -> Rows:
    """cov_it = (A_it - mean A)(new_it - mean new), means over all tokens of the update."""
    mean_advantage = mean([batch.advantages[row][position] for row, position in batch.tokens()])
    mean_new = mean([batch.new[row][position] for row, position in batch.tokens()])
    result = batch.zeros()
    for row, position in batch.tokens():
        result[row][position] = (batch.advantages[row][position] - mean_advantage) * (batch.new[row][position] - mean_new)
    return result


def covariance_candidates(
    batch: Batch, clip_low: float, clip_high: float, low: float = 1.0, high: float = 5.0
) -> list[tuple[int, int]]:
    """Clip-Cov may take tokens that are not clipped already and whose covariance lies in (low, high)."""
    covariance, log_ratio = covariances(batch), token_log_ratios(batch)
    candidates = []
    for row, position in batch.tokens():
        ratio = math.exp(log_ratio.value[row][position])
        clipped = is_clipped(ratio, batch.advantages[row][position], clip_low, clip_high)
        if not clipped and low < covariance[row][position] < high:
            candidates.append((row, position))
    return candidates


def clip_cov_count(batch: Batch, fraction: float) -> int:
    """floor(fraction * T_tot), at least 1."""
    return max(1, math.floor(fraction * batch.token_count()))


def top_covariance_tokens(batch: Batch, count: int) -> list[tuple[int, int]]:
    """KL-Cov penalises the tokens with the largest covariance."""
    covariance = covariances(batch)
    return sorted(batch.tokens(), key=lambda token: -covariance[token[0]][token[1]])[:count]


def top_entropy_tokens(batch: Batch, count: int) -> list[tuple[int, int]]:
    """80/20 keeps the policy loss of the tokens with the largest entropy."""
    return sorted(batch.tokens(), key=lambda token: -batch.entropy[token[0]][token[1]])[:count]


def keep_tokens(batch: Batch, tokens: list[tuple[int, int]]) -> Rows:
    """1 on the given tokens, 0 elsewhere."""
    keep = batch.zeros()
    for row, position in tokens:
        keep[row][position] = 1.0
    return keep


def drop_tokens(batch: Batch, dropped: list[tuple[int, int]]) -> Rows:
    """0 on the given tokens, 1 on the others."""
    return keep_tokens(batch, [token for token in batch.tokens() if token not in dropped])


def balanced_bounds(
    batch: Batch,
    floor: float = 0.2,
    floor_max: float = 0.8,
    floor_step: float = 0.05,
    cap: float = 1.2,
    cap_max: float = 2.0,
    cap_step: float = 0.1,
    target: float = 0.5,
) -> tuple[float, float]:
    """BAPO: while positive / negative contributions < target raise the floor step by step, then the cap."""
    while contributions_ratio(batch, floor, cap) < target:
        if floor < floor_max - 1e-12:
            floor = min(floor + floor_step, floor_max)
        elif cap < cap_max - 1e-12:
            cap = min(cap + cap_step, cap_max)
        else:
            break
    return floor, cap


def contributions_ratio(batch: Batch, floor: float, cap: float) -> float:
    """sum of A min(w, cap) over A >= 0, divided by the sum of |A| max(w, floor) over A < 0."""
    log_ratio, positive, negative = token_log_ratios(batch), 0.0, 0.0
    for row, position in batch.tokens():
        ratio, advantage = math.exp(log_ratio.value[row][position]), batch.advantages[row][position]
        if advantage >= 0:
            positive += advantage * min(ratio, cap)
        else:
            negative -= advantage * max(ratio, floor)
    return positive / negative if negative > 0 else math.inf
