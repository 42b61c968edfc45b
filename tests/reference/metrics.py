"""What a run reports: clip fractions, perplexities, effective sample sizes, divergences of sampler and trainer."""

import math

from tests.reference.batch import Batch, mean
from tests.reference.corrections import behaviour_log_ratios
from tests.reference.objectives import is_clipped


def sequence_ratio(batch: Batch, row: int) -> float:
    """s_i = exp(mean_t (new - old))."""
    return math.exp(mean([batch.new[row][position] - batch.old[row][position] for position in batch.positions(row)]))


def clipped_tokens(batch: Batch, low: float, high: float) -> float:
    """The fraction of tokens whose own ratio is clipped."""
    clipped = [
        is_clipped(math.exp(batch.new[row][t] - batch.old[row][t]), batch.advantages[row][t], low, high)
        for row, t in batch.tokens()
    ]
    return sum(clipped) / len(clipped)


def clipped_sequences(batch: Batch, low: float, high: float) -> list[int]:
    """The rows whose sequence ratio is clipped."""
    return [row for row in batch.filled_rows() if is_clipped(sequence_ratio(batch, row), batch.advantage(row), low, high)]


def out_of_band_sequences(batch: Batch, low: float, high: float) -> list[int]:
    """The rows whose sequence ratio is outside the band, whatever their advantage."""
    return [row for row in batch.filled_rows() if not 1 - low <= sequence_ratio(batch, row) <= 1 + high]


def perplexity(log_probs: list[float], positions: list[int]) -> float:
    """exp(-mean log-prob)."""
    return math.exp(-mean([log_probs[position] for position in positions]))


def effective_sample_size(weights: list[float]) -> float:
    """(sum w)^2 / sum w^2."""
    return math.fsum(weights) ** 2 / math.fsum(weight * weight for weight in weights)


def token_behaviour_ratios(batch: Batch) -> list[float]:
    """rho of every token."""
    log_ratios = behaviour_log_ratios(batch)
    return [math.exp(log_ratios[row][position]) for row, position in batch.tokens()]


def sampler_k1(batch: Batch) -> float:
    """k1 estimate of KL(sampler || old): the mean of roll - old."""
    log_ratios = behaviour_log_ratios(batch)
    return mean([-log_ratios[row][position] for row, position in batch.tokens()])


def sampler_k3(batch: Batch) -> float:
    """k3 estimate of KL(sampler || old): the mean of rho - 1 - log rho."""
    log_ratios = behaviour_log_ratios(batch)
    return mean([math.exp(log_ratios[row][t]) - 1 - log_ratios[row][t] for row, t in batch.tokens()])


def sampler_chi_squared(batch: Batch) -> float:
    """mean rho^2 - 1."""
    return mean([rho * rho for rho in token_behaviour_ratios(batch)]) - 1


def expert_flip_rate(old_logits: list[list[float]], new_logits: list[list[float]], active: int) -> float:
    """Mean over layers of 1 - |old active experts that are still active| / active."""
    flips = []
    for old, new in zip(old_logits, new_logits, strict=True):
        before = set(sorted(range(len(old)), key=lambda expert: -old[expert])[:active])
        after = set(sorted(range(len(new)), key=lambda expert: -new[expert])[:active])
        flips.append(1 - len(before & after) / active)
    return mean(flips)
