"""Computes the metrics of an update from its signals and outcome, as pieces that can be combined over calls.

Each topic is one function. `definitions.py` defines keys, formulas and ranges.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from legato.core.bounded import as_bound
from legato.core.outcome import Outcome, Trace
from legato.core.shapes import PerToken, Spread
from legato.core.signals import Signals
from legato.core.sums import (
    Deviation,
    EffectiveSize,
    Explained,
    Histogram,
    Maximum,
    Mean,
    Minimum,
    Piece,
    Sums,
    Total,
)
from legato.diagnostics.metrics.experts import routing
from legato.diagnostics.metrics.inputs import MetricInputs, largest_magnitudes, metric_inputs

LIMIT = 20.0
"""Largest |log-ratio| before exp, so that one broken token does not make a sum infinite."""


def measure(signals: Signals, outcome: Outcome) -> Sums:
    """Return all metrics that the signals allow."""
    with torch.no_grad():
        if outcome.coefficients.numel() == 0:
            return Sums(_losses(outcome))  # a rank without rows has nothing to measure
        inputs = metric_inputs(signals, outcome)
        pieces = _losses(outcome)
        for topic in _TOPICS:
            pieces.update(topic(inputs))
        return Sums(pieces)


def _losses(outcome: Outcome) -> dict[str, Piece]:
    terms: dict[str, Piece] = {f"loss/{name}": Total(term.double()) for name, term in outcome.trace.terms.items()}
    return {"loss/total": Total(outcome.loss.detach().double()), **terms}


def _drift(inputs: MetricInputs) -> dict[str, Piece]:
    """Ratios and divergences between the anchor and the new policy, and the perplexity equivalence."""
    signals = inputs.signals
    if signals.old_logprobs is None:
        return {}
    new, old = signals.logprobs.detach(), signals.old_logprobs
    log_ratio, largest = _token_log_ratio(inputs)
    rows = log_ratio.sum(1, keepdim=True)
    total, squares = rows.sum(dtype=torch.float64), _squares(log_ratio)
    # w - 1, which is 0 outside the mask. k3 = (w - 1) - lw is taken token by token: where lw is about as large as the GSPO
    # band it is smaller than the rounding of a sum over tokens.
    small = log_ratio.device.type == "cpu" and float(largest) < LIMIT
    limited = log_ratio if small else log_ratio.clamp(-LIMIT, LIMIT)
    excess = torch.expm1(limited, out=inputs.work)
    excess_total, excess_squares = excess.sum(1).sum(dtype=torch.float64), _squares(excess)
    k3 = excess.sub_(limited).sum(1).sum(dtype=torch.float64)
    ratio_total = inputs.tokens + excess_total
    ratio_squares = inputs.tokens + 2 * excess_total + excess_squares

    size = inputs.lengths.clamp(min=1)
    log_s = inputs.sequences.over_rows(rows) / size
    s = log_s.exp()
    responses, weights = inputs.responses, torch.where(inputs.counted, s, 0.0).double()
    sign = inputs.sign
    entropy_old, entropy_new = (-inputs.sequences.over_rows(signals.mask.sum(x, inputs.work)) / size for x in (old, new))
    perplexity_old, perplexity_new = entropy_old.exp(), entropy_new.exp()
    error = (s - perplexity_old / perplexity_new).abs() / s
    return {
        "ratio/sequence_mean": Mean(weights.sum(), responses),
        "ratio/sequence_std": Deviation(weights.sum(), weights.square().sum(), responses),
        "ratio/sequence_min": Minimum(torch.where(inputs.counted, s, torch.inf).amin()),
        "ratio/sequence_max": Maximum(torch.where(inputs.counted, s, -torch.inf).amax()),
        "ratio/sequence_log": inputs.histogram(log_s),
        "ratio/signed_log": inputs.histogram(sign * log_s, sign != 0),
        "ratio/token_log_std": Deviation(total, squares, inputs.tokens),
        "ratio/token_log_max": Maximum(largest),
        "drift/k1": Mean(-total, inputs.tokens),
        "drift/k3": Mean(k3, inputs.tokens),
        "drift/sequence_effective_size": EffectiveSize(weights.sum(), weights.square().sum(), responses),
        "drift/token_effective_size": EffectiveSize(ratio_total, ratio_squares, inputs.tokens),
        "equivalence/perplexity_old": inputs.response_mean(perplexity_old),
        "equivalence/perplexity_new": inputs.response_mean(perplexity_new),
        "equivalence/entropy_change": inputs.response_mean((entropy_old - entropy_new).exp()),
        "equivalence/error": Maximum(torch.where(inputs.counted, error, 0.0).amax()),
    }


def _token_log_ratio(inputs: MetricInputs) -> tuple[PerToken, Tensor]:
    """Return new - old per token and its largest magnitude. Reuses the objective's log-ratio if no limit cut it."""
    log_ratio = inputs.trace.tokens
    if log_ratio is not None and log_ratio.device.type == "cpu":
        largest = largest_magnitudes(log_ratio).amax()
        if float(largest) < LIMIT:
            return log_ratio, largest
    log_ratio = inputs.signals.log_ratio("old")
    return log_ratio, largest_magnitudes(log_ratio).amax()


def _squares(values: PerToken) -> Tensor:
    """Return the sum of squares without allocating the squares."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=1)
    return norms.double().square().sum()


def _clipping(inputs: MetricInputs) -> dict[str, Piece]:
    """Share of tokens and responses that the trust region left without a gradient."""
    trace, mask, advantages = inputs.trace, inputs.signals.mask, inputs.signals.advantages
    if not trace.bounded:
        return {}
    place = inputs.work if trace.log_ratio.shape == inputs.work.shape else torch.empty_like(trace.log_ratio)
    free = torch.eq(trace.log_value, trace.log_ratio, out=place)
    for factor in (trace.selected, None if trace.tokens_clipped is None else ~trace.tokens_clipped):
        free = free if factor is None else free * factor
    # Summed in place: values outside the mask are not read again.
    free_rows = _sum_inside_mask(free, inputs) if _is_one_outside_mask(trace) else mask.sum(free, free)
    pieces: dict[str, Piece] = {"clip/tokens": Mean(inputs.tokens - free_rows.sum(dtype=torch.float64), inputs.tokens)}
    for word, among in (("positive", advantages > 0), ("negative", advantages < 0)):
        member = among.to(free.dtype)
        count = inputs.token_total(member)
        left = free_rows * member if member.shape[1] == 1 else mask.sum(free * member)
        pieces[f"clip/tokens_{word}"] = Mean(count - left.sum(dtype=torch.float64), count)
    clipped = (inputs.sequences.over_rows(free_rows) == 0).to(free.dtype)
    pieces["clip/sequences"] = inputs.response_mean(clipped)
    pieces["clip/sequences_positive"] = inputs.response_mean(clipped, inputs.sign > 0)
    pieces["clip/sequences_negative"] = inputs.response_mean(clipped, inputs.sign < 0)
    pieces["clip/sequences_length"] = inputs.by_length(clipped)
    return pieces | _band(inputs) | _gate(inputs)


def _band(inputs: MetricInputs) -> dict[str, Piece]:
    trace = inputs.trace
    if trace.band is None:
        return {}
    log_ratio = trace.log_ratio
    low, high = trace.band
    lower, upper = (as_bound(bound, log_ratio) for bound in trace.band)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        inside = torch.minimum(torch.maximum(log_ratio, lower), upper).eq_(log_ratio)
    else:
        place = inputs.work if log_ratio.shape == inputs.work.shape else None
        inside = torch.clamp(log_ratio, low, high, out=place).eq_(log_ratio)
    first = inside[:, :1].clone()
    rows = _sum_inside_mask(inside, inputs) if _is_one_outside_mask(trace) else inputs.signals.mask.sum(inside, inside)
    inside_tokens = rows.sum(dtype=torch.float64)
    pieces: dict[str, Piece] = {
        "clip/outside_tokens": Mean(inputs.tokens - inside_tokens, inputs.tokens),
        "clip/band_low": inputs.token_mean(_per_row(-torch.expm1(lower), inputs)),
        "clip/band_high": inputs.token_mean(_per_row(torch.expm1(upper), inputs)),
    }
    if trace.level == "sequence":
        pieces["clip/outside_sequences"] = inputs.response_mean(1 - first)
    return pieces | (_adaptive_band(inputs, lower, upper) if trace.adapts else {})


def _adaptive_band(inputs: MetricInputs, lower: Tensor, upper: Tensor) -> dict[str, Piece]:
    """Statistics that an adaptive band follows. Each response, turn or token is one ratio; the sign of A picks its side."""
    log_ratio, advantages = inputs.trace.log_ratio, inputs.signals.advantages
    if inputs.signals.keep is not None:
        # Filtered tokens do not count, and may have been left out of the update beforehand.
        advantages = advantages * inputs.signals.keep
    if log_ratio.shape[1] == 1:
        weights = inputs.counted.to(log_ratio.dtype)
    else:
        size = inputs.signals.segments(inputs.trace.level).size()
        weights = inputs.signals.mask.select(1 / size.clamp(min=1))
    pieces = dict[str, Piece]()
    sides = {"positive": (advantages > 0, upper, log_ratio > upper), "negative": (advantages < 0, lower, log_ratio < lower)}
    for word, (among, bound, beyond) in sides.items():
        shares = torch.where(among, weights, 0.0).double()
        # Selected, not multiplied: outside the mask and where A is 0 the ratio may be anything.
        reach = torch.where(shares > 0, log_ratio / bound, 0.0).double()
        count = shares.sum()
        pieces[f"clip/beyond_{word}"] = Mean((shares * beyond).sum(), count)
        pieces[f"clip/reach_{word}"] = Deviation((shares * reach).sum(), (shares * reach.square()).sum(), count)
    return pieces


def _is_one_outside_mask(trace: Trace) -> bool:
    """Whether "inside the band" and "not clipped" are always 1 outside the mask, so that sums need no selection."""
    low, high = trace.band or (1.0, -1.0)
    plain = not isinstance(low, Tensor) and not isinstance(high, Tensor) and low <= 0 <= high
    return plain and trace.zero_outside and trace.selected is None and trace.tokens_clipped is None


def _sum_inside_mask(values: Spread, inputs: MetricInputs) -> Tensor:
    """Sum 0/1 values over tokens, [B, 1], where the values are 1 outside the mask."""
    if values.shape[1] == 1:
        return inputs.signals.mask.sum(values)
    return values.sum(1, keepdim=True) - (values.shape[1] - inputs.signals.mask.lengths)


def _per_row(bound: Tensor, inputs: MetricInputs) -> Spread:
    return bound.expand_as(inputs.lengths) if bound.numel() == 1 else bound


def _gate(inputs: MetricInputs) -> dict[str, Piece]:
    if inputs.trace.gate is None:
        return {}
    gate = inputs.trace.gate(inputs.work)
    # The gate is ours to overwrite; comparing into floats is vectorised on a CPU, comparing into bools is not.
    mask = inputs.signals.mask
    total = mask.sum(gate, gate).sum(dtype=torch.float64)
    closed = mask.sum(gate.lt_(0.5), gate).sum(dtype=torch.float64)
    return {"gate/mean": Mean(total, inputs.tokens), "gate/closed": Mean(closed, inputs.tokens)}


def _keep(inputs: MetricInputs) -> dict[str, Piece]:
    kept = inputs.trace.kept
    if kept is None:
        return {}
    whole = (inputs.sequences.over_rows(inputs.signals.mask.sum(kept)) > 0).to(kept.dtype)
    return {
        "keep/tokens": inputs.token_mean(kept),
        "keep/sequences": inputs.response_mean(whole),
        "keep/sequences_length": inputs.by_length(whole),
    }


def _mismatch(inputs: MetricInputs) -> dict[str, Piece]:
    signals = inputs.signals
    if signals.sampler_logprobs is None or signals.old_logprobs is None:
        return {}
    gap = signals.behaviour_log_ratio()
    limited = gap.clamp(-LIMIT, LIMIT)
    rho = limited.exp()
    rho_total, squares = inputs.token_total(rho), inputs.token_total(rho.square())
    product = inputs.sequences.sum(gap).clamp(-LIMIT, LIMIT).exp()
    chi2_sequence = inputs.response_mean(product.square() - 1)
    return {
        "mismatch/k1": Mean(-inputs.token_total(gap), inputs.tokens),
        "mismatch/k3": inputs.token_mean(torch.expm1(limited) - limited),
        "mismatch/absolute": inputs.token_mean(gap.abs()),
        "mismatch/max": Maximum(largest_magnitudes(gap).amax()),
        "mismatch/chi2_token": Mean(squares - inputs.tokens, inputs.tokens),
        "mismatch/chi2_sequence": chi2_sequence,
        "mismatch/effective_size": EffectiveSize(rho_total, squares, inputs.tokens),
        "mismatch/above_two": inputs.token_mean((rho > 2).to(rho.dtype)),
        "mismatch/below_half": inputs.token_mean((rho < 0.5).to(rho.dtype)),
        "mismatch/sequence_log": inputs.histogram(inputs.sequences.mean(gap)),
    }


def _weights(inputs: MetricInputs) -> dict[str, Piece]:
    weight = inputs.trace.weight
    if weight is None:
        return {}
    total, squares = inputs.token_total(weight), inputs.token_total(weight.square())
    return {
        "weight/mean": Mean(total, inputs.tokens),
        "weight/effective_size": EffectiveSize(total, squares, inputs.tokens),
    }


def _reference(inputs: MetricInputs) -> dict[str, Piece]:
    signals = inputs.signals
    if signals.ref_logprobs is None:
        return {}
    gap = signals.mask.difference(signals.ref_logprobs, signals.logprobs.detach()).clamp(-LIMIT, LIMIT)
    return {
        "reference/k1": inputs.token_mean(-gap),
        "reference/k3": inputs.token_mean(torch.expm1(gap) - gap),
    }


def _channels(inputs: MetricInputs) -> dict[str, Piece]:
    """Entropy, values and router shift, if the signals have them."""
    signals, pieces = inputs.signals, dict[str, Piece]()
    if signals.entropy is not None:
        pieces["entropy/mean"] = inputs.token_mean(signals.entropy.detach())
    if signals.router_shift is not None:
        gamma = signals.mask.select(signals.router_shift)
        pieces["router/shift_mean"] = inputs.token_mean(gamma)
        pieces["router/shift"] = Histogram.from_values(gamma, signals.mask.tokens)
        pieces["router/floored"] = inputs.token_mean((gamma < 0.8).to(gamma.dtype))
    if signals.values is not None and signals.returns is not None:
        returns = signals.mask.select(signals.returns)
        residual = signals.mask.select(signals.returns - signals.values.detach())
        pieces["value/explained"] = Explained(
            residual=inputs.token_total(residual),
            residual_squares=inputs.token_total(residual.square()),
            target=inputs.token_total(returns),
            target_squares=inputs.token_total(returns.square()),
            count=inputs.tokens,
        )
    if signals.values is not None and signals.old_values is not None:
        moved = signals.mask.select((signals.values.detach() - signals.old_values).abs())
        pieces["value/moved"] = inputs.token_mean(moved)
        if inputs.trace.value_clip is not None:
            pieces["value/clipped"] = inputs.token_mean((moved > inputs.trace.value_clip).to(moved.dtype))
    return pieces


def _data(inputs: MetricInputs) -> dict[str, Piece]:
    """Lengths, advantages and which responses carry a gradient at all."""
    lengths, rollouts = inputs.lengths, _rollouts(inputs)
    advantages = inputs.signals.advantages
    strength = inputs.sequences.mean(advantages.abs())
    # Coefficients are exactly 0 outside the mask, so the rows need no selection.
    nonzero = inputs.sequences.over_rows(largest_magnitudes(inputs.outcome.coefficients)) > 0
    return {
        "coefficient/sequences": inputs.response_mean(nonzero.to(lengths.dtype)),
        "advantage/zero": inputs.response_mean((strength == 0).to(lengths.dtype)),
        "advantage/absolute": inputs.response_mean(strength),
        "length/mean": Mean(inputs.tokens, inputs.responses),
        "length/max": Maximum(lengths.amax()),
        "length/tokens": inputs.histogram(lengths),
        "length/empty": Mean(rollouts - inputs.responses, rollouts),
    }


def _rollouts(inputs: MetricInputs) -> Tensor:
    rollout = inputs.signals.rollout
    count = len(inputs.lengths) if rollout is None else len(torch.unique(rollout))
    return torch.full((), count, dtype=torch.float64, device=inputs.lengths.device)


_TOPICS: tuple[Callable[[MetricInputs], dict[str, Piece]], ...] = (
    _drift,
    _clipping,
    _keep,
    _mismatch,
    _weights,
    _reference,
    _channels,
    routing,
    _data,
)
