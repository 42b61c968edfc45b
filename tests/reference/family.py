"""The named algorithms: each a weight, a ratio, a trust region and an aggregation, with the defaults of its paper."""

from collections.abc import Callable
from functools import partial

from tests.reference import aggregation, corrections, factors, objectives, penalties, ratios, selections
from tests.reference.batch import Batch, Result, Rows

# Members whose paper leaves a constant open get one here; the tests pass the same to the package.
GENERATION_BUDGET = 8.0
LENGTH_FAIR_BAND = (0.05, 0.06)

Aggregate = Callable[[Batch], Rows]


def token_clip(batch: Batch, aggregate: Aggregate, low: float = 0.2, high: float = 0.2) -> Result:
    """min-clip on the token ratio new / old."""
    return objectives.clipped_tokens(batch, aggregate(batch), ratios.token_log_ratios(batch), low, high)


def segment_clip(batch: Batch, aggregate: Aggregate, low: float, high: float, level: str = "sequence") -> Result:
    """min-clip on the geometric mean of the ratio over the segment."""
    log_ratio = ratios.token_log_ratios(batch, limit=None)
    return objectives.clipped_segments(batch, aggregate(batch), log_ratio, low, high, level)


def gspo_token(batch: Batch) -> Result:
    """GSPO's ratio, a clip and an advantage per token."""
    log_ratio = ratios.token_log_ratios(batch, limit=None)
    return objectives.carried_sequences(batch, aggregation.sequence_mean(batch), log_ratio, 3e-4, 4e-4)


def gmpo(batch: Batch) -> Result:
    """The geometric mean of token ratios, each clipped first."""
    log_ratio = ratios.token_log_ratios(batch)
    return objectives.log_clipped_tokens_then_mean(batch, aggregation.sequence_mean(batch), log_ratio)


def rspo(batch: Batch) -> Result:
    """GMPO with the router shift folded into each log-ratio before the clip."""
    log_ratio = ratios.with_router_shift(batch, ratios.token_log_ratios(batch))
    return objectives.log_clipped_tokens_then_mean(batch, aggregation.sequence_mean(batch), log_ratio)


def sapo(batch: Batch) -> Result:
    """A soft gate in place of the clip."""
    return objectives.soft_gated_tokens(batch, aggregation.sequence_mean(batch), ratios.token_log_ratios(batch))


def cispo(batch: Batch, cap: float = 5.0) -> Result:
    """The capped ratio as a weight on log pi."""
    return objectives.weighted_log_probs(batch, aggregation.group_token_mean(batch), factors.capped_ratios(batch, cap))


def reinforce(batch: Batch) -> Result:
    """No ratio: every gradient entry is -A_i / N."""
    return objectives.weighted_log_probs(batch, aggregation.sequence_sum(batch), factors.ones(batch))


def ppo(batch: Batch) -> Result:
    """PPO's policy term and clipped value loss; the gradient is that in the new log-probs."""
    policy = token_clip(batch, aggregation.token_mean)
    value, _ = penalties.value_loss(batch)
    return Result(policy.loss + value, policy.gradient)


def fspo(batch: Batch) -> Result:
    """The product ratio inside a band that grows with sqrt(L)."""
    return objectives.length_fair_products(batch, aggregation.sequence_mean(batch), *LENGTH_FAIR_BAND)


def seq_product(batch: Batch) -> Result:
    """The product ratio inside a fixed band."""
    return objectives.clipped_products(batch, aggregation.sequence_mean(batch), 0.2, 0.2)


def gepo(batch: Batch) -> Result:
    """The likelihood over the group's expected likelihood."""
    return objectives.group_expectation(batch, aggregation.sequence_mean(batch), 0.2, 0.2)


def vespo(batch: Batch) -> Result:
    """A kernel of the product ratio as a weight on log pi."""
    return objectives.weighted_log_probs(batch, aggregation.token_mean(batch), factors.kernel_weights(batch))


def minirl(batch: Batch, cap: float = 5.0) -> Result:
    """sg[M w min(rho, cap)] A log pi, summed over tokens."""
    weight = aggregation.times(batch, aggregation.sequence_sum(batch), corrections.truncated(batch, "token", cap))
    return objectives.weighted_log_probs(batch, weight, factors.masked_ratios(batch))


def dppo(batch: Batch) -> Result:
    """sg[M min(w, 20)] A log pi, w against the sampler, M by the total variation of the sampled token."""
    return objectives.weighted_log_probs(batch, aggregation.token_mean(batch), factors.divergence_masked_ratios(batch))


def bapo(batch: Batch) -> Result:
    """min-clip whose bounds are searched on this update."""
    floor, cap = selections.balanced_bounds(batch)
    return token_clip(batch, aggregation.token_mean, 1 - floor, cap - 1)


FAMILY: dict[str, Callable[[Batch], Result]] = {
    "gspo": partial(segment_clip, aggregate=aggregation.sequence_mean, low=3e-4, high=4e-4),
    # Before its band has moved; where it has, tests/objectives/test_adaptive.py compares with other bands.
    "gspo-auto": partial(segment_clip, aggregate=aggregation.sequence_mean, low=3e-4, high=4e-4),
    "gspo-token": gspo_token,
    "turn-gspo": partial(segment_clip, aggregate=aggregation.sequence_mean, low=3e-4, high=4e-4, level="turn"),
    "grpo": partial(token_clip, aggregate=aggregation.sequence_mean),
    "grpo-baseline": partial(token_clip, aggregate=aggregation.sequence_mean, high=0.27),
    "dr-grpo": partial(token_clip, aggregate=partial(aggregation.sequence_sum_over_constant, constant=GENERATION_BUDGET)),
    "dapo": partial(token_clip, aggregate=aggregation.group_token_mean, high=0.28),
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "rspo": rspo,
    "srpo": partial(token_clip, aggregate=aggregation.token_mean),
    "ppo": ppo,
    "reinforce": reinforce,
    "rloo": reinforce,
    "reinforce++": partial(token_clip, aggregate=aggregation.token_mean),
    "lite-ppo": partial(token_clip, aggregate=aggregation.token_mean),
    "luspo": partial(segment_clip, aggregate=aggregation.sequence_sum, low=2e-3, high=2.5e-3),
    "fspo": fspo,
    "gepo": gepo,
    "vespo": vespo,
    "minirl": minirl,
    "dppo": dppo,
    "bapo": bapo,
    "seq-product": seq_product,
}
