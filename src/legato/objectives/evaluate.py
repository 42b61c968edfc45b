"""How the slots compose: signals in, loss and coefficients out.

    L = - sum_it n_it b_it keep_it A_it r~_it + sum over penalties
n from the aggregate and the counts, b and keep from the corrections (detached), r~ the ratio after the trust region.
The coefficients are torch.autograd.grad of minus L at detached `[B, T]` leaves: right by construction for any new part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.core.bounded import exponential_sum, sum_of_row_means, weighted_sum
from legato.core.counts import Counts
from legato.core.outcome import Coefficients, Outcome, Trace
from legato.core.own_parts import check_returned, check_returned_type
from legato.core.shapes import PerToken, Scalar, Spread
from legato.core.signals import Signals
from legato.objectives.aggregates import TokenMean
from legato.objectives.corrections import multiply
from legato.objectives.counting import rollout_lengths, tally
from legato.objectives.objective import Objective
from legato.objectives.penalties import ValueLoss
from legato.objectives.slots import Adjustment, Aggregate, Context, Region, State, TokenTrust, Trust

_CHANNELS = ("logprobs", "entropy", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surrogate:
    """The terms of the maximised objective with their autograd graph, and the intermediate results."""

    terms: Mapping[str, Scalar]
    region: Region
    tokens: PerToken
    tokens_clipped: Tensor | None
    adjustment: Adjustment
    kept: Spread | None


def evaluate(
    objective: Objective, aggregate: Aggregate, signals: Signals, counts: Counts, state: State | None = None
) -> Outcome:
    """Loss, coefficients of every channel and the trace of one call."""
    channels = {"logprobs", *(name for part in objective.penalties for name in part.channels)}
    used = [name for name in _CHANNELS if name in channels]
    leaves = {name: _leaf(signals.tensor(name)) for name in used}
    with torch.enable_grad():
        context = Context(
            signals=replace(signals, **leaves),  # type: ignore[arg-type]
            segments=signals.segments(objective.ratio.level),
            counts=counts,
            state=objective.initial() if state is None else state,
        )
        surrogate = _surrogate(objective, aggregate, context)
        objective_value = sum(list(surrogate.terms.values())[1:], start=surrogate.terms["policy"])
        gradients = torch.autograd.grad(objective_value, list(leaves.values()), allow_unused=True)
    coefficients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }
    field = Coefficients(
        logprobs=coefficients["logprobs"], entropy=coefficients.get("entropy"), values=coefficients.get("values")
    )
    tied = field.tie(0.0 - objective_value.detach(), **{name: signals.tensor(name) for name in used})
    return Outcome(loss=tied, field=field, trace=_trace(objective, surrogate, signals.advantages.shape[1] == 1))


def _leaf(channel: Tensor) -> Tensor:
    # Autograd refuses tensors created in inference mode, but not their copies.
    return (channel.clone() if channel.is_inference() else channel.detach()).requires_grad_()


def _surrogate(objective: Objective, aggregate: Aggregate, context: Context) -> _Surrogate:
    signals = context.signals
    adjustment = objective.adjustment(context)
    tokens = _tokens(objective, signals)
    region, tokens_clipped = _ratio(objective, adjustment, tokens, context)
    for part in objective.trust:
        if not isinstance(part, TokenTrust):
            region = part.apply(region, context)
            if part.of_user:
                _check_region(part, region, signals)
            region = region if region.band is not None else _with_band(part, region, context)

    keep = multiply(multiply(signals.keep, adjustment.keep), region.kept)
    counts = context.counts
    if objective.keep_reads_logprobs(aggregate):
        groups = None if counts.all.group_tokens is None else len(counts.all.group_tokens)
        counts = replace(counts, kept=tally(signals, keep, groups))
    counts_kept_only = aggregate.denominator == "kept"
    lengths = rollout_lengths(signals, keep if counts_kept_only else None)
    weights = aggregate.weights(counts.tally(aggregate.denominator), lengths, signals.group)
    if aggregate.of_user:
        check_returned(aggregate, "weights", weights, len(signals.logprobs), 1)

    factor: Spread | None = weights * signals.advantages
    for each in (None if objective.folds_weights else adjustment.weight, keep, region.selected):
        factor = multiply(factor, each)
    assert factor is not None
    terms = {"policy": _policy(objective, region, factor, signals)}

    all_lengths = rollout_lengths(signals, None)
    for penalty in objective.penalties:
        mean = TokenMean() if penalty.token_mean else aggregate
        penalty_weights = mean.weights(context.counts.all, all_lengths, signals.group)
        values = penalty.apply(context)
        if penalty.of_user:
            check_returned(penalty, "apply", values, *_shape(signals), 1)
        terms[penalty.name] = -_total(values, penalty_weights, signals)
    return _Surrogate(
        terms=terms, region=region, tokens=tokens, tokens_clipped=tokens_clipped, adjustment=adjustment, kept=keep
    )


def _tokens(objective: Objective, signals: Signals) -> PerToken:
    """The token log-ratios, differentiable only where the ratio is differentiated through."""
    ratio = objective.ratio
    tokens = ratio.tokens(signals if ratio.gradient == "through" else replace(signals, logprobs=signals.logprobs.detach()))
    if ratio.of_user:
        check_returned(ratio, "tokens", tokens, *_shape(signals))
    return tokens


def _ratio(objective: Objective, adjustment: Adjustment, tokens: PerToken, context: Context) -> tuple[Region, Tensor | None]:
    """The ratio at its level, and a mask of the tokens that a trust region bounded before the mean."""
    ratio, signals = objective.ratio, context.signals
    if adjustment.log_shift is not None:
        tokens = tokens + adjustment.log_shift
    unbounded = tokens
    for part in objective.trust:
        if isinstance(part, TokenTrust):
            tokens = part.apply_tokens(tokens, context)
            if part.of_user:
                check_returned(part, "apply_tokens", tokens, *_shape(signals))
    log_ratio = ratio.reduce(tokens, context)
    if ratio.of_user:
        check_returned(ratio, "reduce", log_ratio, *_shape(signals), 1)
    if ratio.gradient == "carrier":
        log_ratio = log_ratio + signals.mask.difference(signals.logprobs, signals.logprobs.detach())
    if objective.folds_weights and adjustment.weight is not None:
        log_weight = adjustment.weight.log()
        if log_weight.shape[1] != 1:
            log_weight = context.segments.sum(signals.mask.select(log_weight))
        log_ratio = log_ratio + log_weight
    bounded_tokens = None if tokens is unbounded else tokens.detach() != unbounded.detach()
    return Region(log_ratio=log_ratio, log_value=log_ratio), bounded_tokens


def _shape(signals: Signals) -> tuple[int, int]:
    rows, width = signals.logprobs.shape
    return rows, width


def _check_region(part: Trust, region: Region, signals: Signals) -> None:
    """Check what a trust part returned."""
    check_returned_type(part, "apply", region, Region)
    for name in ("log_ratio", "log_value", "value", "selected", "kept"):
        check_returned(part, f"{name} of apply", getattr(region, name), *_shape(signals), 1)


def _with_band(part: Trust, region: Region, context: Context) -> Region:
    """The region with the bounds that a part states, for the metrics. Used if `apply` did not set a band."""
    stated = part.bounds(context.state.get(part.name))
    if stated is None or stated.is_open:
        return region
    return replace(region, band=(stated.lower, stated.upper))


def _policy(objective: Objective, region: Region, factor: Spread, signals: Signals) -> Scalar:
    """The policy term of the surrogate: the sum of factor times the ratio after the trust region."""
    log_value, mask = region.log_value, signals.mask
    if not _is_small(log_value):
        # A ratio without a narrow limit may be infinite. Where its factor is 0, the term must be 0 and not 0 * inf.
        log_value = torch.where(factor != 0, log_value, 0.0)
    if objective.ratio.gradient == "weight":
        weight = log_value.exp() if region.value is None else region.value
        weight = weight.expand(mask.tokens.shape).detach() * factor
        return weighted_sum(signals.logprobs, weight, mask)
    if region.value is None and log_value.shape[1] != 1:
        # A carried ratio is one number of the response: with equal advantages the bits are those of the ratio itself.
        add_up = sum_of_row_means if objective.ratio.gradient == "carrier" else exponential_sum
        return add_up(log_value, factor, mask)
    return _total(log_value.exp() if region.value is None else region.value, factor, signals)


def _is_small(log_value: Spread) -> bool:
    """Whether exp(log_value) is certainly finite. Only checked on a CPU: on a GPU the host would have to wait."""
    return log_value.device.type == "cpu" and bool(log_value.numel() == 0 or log_value.detach().amax() < 80)


def _total(value: Spread, factor: Spread, signals: Signals) -> Scalar:
    """The sum over mask tokens of value * factor; `factor` carries no gradient.

    Tensors that are constant along a row stay [B, 1].
    """
    if value.shape[1] == 1:
        return (value * signals.mask.sum(factor)).sum()
    if factor.shape[1] == 1:
        return (signals.mask.sum(value) * factor).sum()
    return torch.dot(value.reshape(-1), signals.mask.select(factor).reshape(-1))


def _trace(objective: Objective, surrogate: _Surrogate, per_response: bool) -> Trace:
    region, ratio = surrogate.region, objective.ratio
    # A carried sequence ratio is spread over the tokens for its gradient only; its value is one number per row.
    width = 1 if ratio.gradient == "carrier" and ratio.level == "sequence" and per_response else None
    anchored = ratio.reads_anchor and getattr(ratio, "anchor", None) == "old"
    return Trace(
        log_ratio=region.log_ratio.detach()[:, :width],
        tokens=surrogate.tokens.detach() if anchored else None,
        log_value=region.log_value.detach()[:, :width],
        selected=multiply(region.selected, region.kept),
        tokens_clipped=surrogate.tokens_clipped,
        band=region.band,
        gate=region.gate,
        bounded=bool(objective.trust),
        weight=surrogate.adjustment.weight,
        kept=surrogate.kept,
        zero_outside=ratio.level == "token" and ratio.gradient != "carrier",
        value_clip=next((part.clip for part in objective.penalties if isinstance(part, ValueLoss)), None),
        level=ratio.level,
        adapts=region.adapts,
        terms={name: 0.0 - term.detach() for name, term in surrogate.terms.items()},
    )
