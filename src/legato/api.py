"""The public functions for other training loops. Values are checked here and at collation (`core/checks.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from legato.advantages.estimator import Estimator, Scores
from legato.algorithms.algorithm import Algorithm, check_state
from legato.algorithms.catalogue import algorithm_names, entry
from legato.algorithms.override import override
from legato.core import checks
from legato.core.counts import Counts
from legato.core.importing import is_import_path
from legato.core.mask import Mask
from legato.core.outcome import Outcome
from legato.core.parts import lookup, names, nearest
from legato.core.scope import Scope
from legato.core.segments import renumber
from legato.core.signals import Signals
from legato.diagnostics.metrics.measure import measure
from legato.errors import InputError
from legato.objectives.slots import State


def algorithm(name: str | Algorithm, overrides: Mapping[str, Any] | None = None) -> Algorithm:
    """A named algorithm, or an algorithm value, with changes by dotted path. The result is frozen.

    >>> algorithm("gspo", {"objective.trust.clip.low": 2e-3}).objective.trust[0].low
    0.002
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise InputError(f"overrides are a mapping of paths to values; got {type(overrides).__name__}")
    if isinstance(name, Algorithm):
        value = name
    elif isinstance(name, str):
        value = entry(name).value
    else:
        raise InputError(f"an algorithm is a name or a value made by legato.algorithm; got {type(name).__name__}")
    return override(value, overrides) if overrides else value


def loss(
    algorithm: str | Algorithm,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None = None,
    group: Tensor | None = None,
    counts: Counts | None = None,
    sampler_logprobs: Tensor | None = None,
    kept_logmass: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    turn: Tensor | None = None,
    rollout: Tensor | None = None,
    router_shift: Tensor | None = None,
    keep: Tensor | None = None,
    uniform: Tensor | None = None,
    state: State | None = None,
    metrics: bool = True,
) -> Outcome:
    """The loss of an update, or of a part of one when `counts` of the whole are given.

    Values outside the mask are never read. `legato explain NAME` lists the arguments that an algorithm reads.
    logprobs          [B, T] log-probs of the sampled tokens under the policy being trained, at the sampling temperature,
                      float32 or float64; the gradient goes here
    advantages        [B] per response or [B, T] per token
    mask              [B, T], 1 at tokens the policy wrote, 0 at padding, tool and template tokens
    old_logprobs      [B, T] the anchor: the trainer's log-probs before the first update on these rollouts
    sampler_logprobs  [B, T] the log-probs that the engine reported, before top-p, top-k or min-p
    kept_logmass      [B, T] log of the probability that truncation kept; 0 without truncation
    ref_logprobs      [B, T] the frozen reference model's, for KL penalties
    entropy           [B, T] entropy of the policy's distribution; its own gradient channel
    values, old_values, returns   [B, T] for the value loss; `values` is a gradient channel
    router_shift      [B, T] gamma in (0, 1], see `legato.diagnostics.metrics.routing.router_shift`
    group             [B] integer ids of the prompt; any integers, but dense (0, 1, 2 ...) where `counts` are passed
    turn              [B, T] turn index of each token, -1 outside turns
    rollout           [B] ids; rows that share one are one response and must be in one call
    keep              [B] or [B, T], 0/1: where 0 the policy term is dropped, penalties stay
    uniform           [B, T] numbers in [0, 1) for random selections (clip-cov)
    counts            the sum of `legato.counts` over the whole update, when this call is a part of it
    state             of adaptive parts: `algorithm.initial()`, then `algorithm.advance(state, sums, first=...)`

    `outcome.loss.backward()` gives the gradient; `outcome.coefficients` is minus that gradient with respect to
    `logprobs`; `outcome.metrics` are numbers, `outcome.sums` combine over calls. Split an update into calls by passing
    `counts=` the sum of `legato.counts` over all of them, and add the losses. Where gradients are averaged over R ranks,
    multiply the loss by R.
    """
    value = _algorithm(algorithm)
    if torch.is_inference_mode_enabled():
        raise InputError("legato.loss differentiates inside: call it outside torch.inference_mode (torch.no_grad is fine)")
    if counts is not None and not isinstance(counts, Counts):
        raise InputError(f"counts is a {type(counts).__name__}; what legato.counts returns, or a sum of it, is needed")
    like = checks.channel("logprobs", checks.tensor("logprobs", logprobs))
    tensors = {
        "old_logprobs": old_logprobs,
        "sampler_logprobs": sampler_logprobs,
        "kept_logmass": kept_logmass,
        "ref_logprobs": ref_logprobs,
        "entropy": entropy,
        "values": values,
        "old_values": old_values,
        "returns": returns,
        "router_shift": router_shift,
        "uniform": uniform,
    }
    signals = _signals(value, like, tensors, mask=mask, group=group, turn=turn, rollout=rollout, keep=keep)
    checks.same_device({"advantages": checks.tensor("advantages", advantages)}, like)
    check_state(value.name, state, value.initial())
    signals = replace(signals, logprobs=logprobs, advantages=_advantages(value, advantages, signals))
    signals, groups = _group_tables(value, signals, counts)
    own = value.count(signals, groups)
    if counts is None:
        counts = own
    elif not counts.fits(own):
        raise InputError(
            f"counts were made for another algorithm than {value.name}; make them with legato.counts of this one"
        )
    elif float(counts.all.tokens) < float(own.all.tokens):
        raise InputError(
            f"counts know {int(counts.all.tokens)} tokens, but this call alone has {int(own.all.tokens)};"
            " pass the sum of legato.counts over the whole update"
        )
    elif value.scope is Scope.UPDATE and not own.equals(counts):
        raise InputError(
            f"{value.name} has parts that need the whole update in one call (update scope), but the counts given are not"
            " those of this call. Compute the coefficients once for the whole update and slice them:"
            " outcome.field.rows(index).tie(...)"
        )
    outcome = value.evaluate(signals, counts, state)
    return replace(outcome, sums=measure(signals, outcome)) if metrics else outcome


def counts(
    algorithm: str | Algorithm,
    *,
    mask: Tensor,
    group: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    kept_logmass: Tensor | None = None,
    turn: Tensor | None = None,
    rollout: Tensor | None = None,
    router_shift: Tensor | None = None,
    keep: Tensor | None = None,
) -> Counts:
    """The normalising counts of a micro-batch. Add them over micro-batches and ranks; pass the sum to each `loss`.

    If the algorithm uses groups, ids must be dense over the whole update (0, 1, 2 ...), since they index a table.
    """
    value = _algorithm(algorithm)
    if checks.tensor("mask", mask).dim() != 2:
        raise InputError(f"mask has shape {list(mask.shape)}; [B, T] is needed")
    tensors = {
        "old_logprobs": old_logprobs,
        "sampler_logprobs": sampler_logprobs,
        "kept_logmass": kept_logmass,
        "router_shift": router_shift,
    }
    dtype = next((checks.tensor(name, x).dtype for name, x in tensors.items() if x is not None), torch.float32)
    like = torch.zeros((), dtype=dtype, device=mask.device).expand(mask.shape)
    signals = _signals(value, like, tensors, mask=mask, group=group, turn=turn, rollout=rollout, keep=keep, anchor_side=True)
    groups = None
    if value.objective.needs_groups(value.aggregate):
        dense, groups = checks.dense_ids("group", _require_group(value, group), len(mask))
        signals = replace(signals, group=dense)
    return value.count(signals, groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages `[B]` or `[B, T]` in the dtype of the rewards, and returns `[B, T]` where the estimator has them."""

    advantages: Tensor
    returns: Tensor | None = None


def advantages(
    algorithm: str | Algorithm | Estimator,
    *,
    rewards: Tensor,
    group: Tensor | None = None,
    mask: Tensor | None = None,
    values: Tensor | None = None,
    turn: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn_states: Tensor | None = None,
    components: Tensor | Mapping[str, Tensor] | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> Advantages:
    """Advantages from rewards `[B]`, by the estimator of an algorithm, an estimator, or an estimator's name.

    Call it once with all responses of a step, before they are split into updates. `turn_rewards` is `[B, U]`,
    `components` `[B, C]` or a mapping of names to `[B]`. NaN is refused: leave unscorable responses out. One row is one
    rollout here: where several rows are one, give each rollout once and spread the result (`advantages[rollout]`).

    >>> advantages("gspo", rewards=torch.tensor([1.0, 0.0]), group=torch.tensor([7, 7])).advantages
    tensor([ 1.0000, -1.0000])
    """
    estimator = _estimator(algorithm)
    if checks.tensor("rewards", rewards).dim() != 1:
        raise InputError(f"rewards has shape {list(rewards.shape)}; [B], one per response, is needed")
    rows = len(rewards)
    if isinstance(components, Mapping):
        components = _component_table(components, rewards)
    tables = {"turn_rewards": turn_rewards, "turn_states": turn_states, "components": components}
    checks.same_device({**tables, "mask": mask, "values": values, "turn": turn, "group": group}, rewards, "rewards")
    for name, table in tables.items():
        if table is not None and (table.dim() != 2 or len(table) != rows):
            raise InputError(f"{name} has shape {list(table.shape)}; [{rows}, ...], one row per response, is needed")
    for name, tensor in {"rewards": rewards, "components": components}.items():
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"{name} holds a value that is not finite; leave unscorable responses out of the group before this call"
            )
    wide = {"values": values, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    tensors: dict[str, Tensor | None] = {**wide, **tables, "mask": mask, "turn": turn}
    checks.same_device(wide, rewards, "rewards")
    checks.require_signals(f"the estimator '{estimator.name}'", {"its formula": estimator.needs()}, tensors)
    token_mask = None
    if mask is not None:
        if mask.dim() != 2 or len(mask) != rows:
            raise InputError(f"mask has shape {list(mask.shape)}; [{rows}, T] is needed beside rewards [{rows}]")
        token_mask = Mask(checks.zero_one("mask", mask), torch.float64)
    for name, tensor in wide.items():
        if tensor is not None and token_mask is not None:
            exact = checks.per_token(name, tensor, token_mask.tokens, "mask").double()
            checks.finite(name, exact, token_mask.tokens)
            wide[name] = exact
    estimate = estimator.estimate(
        Scores(
            rewards=rewards.double(),
            group=_dense_group(estimator, group, rows),
            mask=token_mask,
            turn=None if turn is None or token_mask is None else checks.turns(turn, token_mask.tokens),
            turn_rewards=turn_rewards,
            turn_states=turn_states,
            components=None if components is None else components.double(),
            **wide,
        )
    )
    dtype = rewards.dtype if rewards.dtype == torch.float64 else torch.float32
    return Advantages(
        advantages=estimate.advantages.to(dtype),
        returns=None if estimate.returns is None else estimate.returns.to(dtype),
    )


def _component_table(components: Mapping[str, Tensor], rewards: Tensor) -> Tensor:
    """[B, C] of a mapping of names to [B]."""
    checks.same_device(components, rewards, "rewards")
    if not components or any(each.shape != rewards.shape for each in components.values()):
        shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in components.items()) or "no component"
        raise InputError(f"expected components of shape {list(rewards.shape)}, one number per response, got {shapes}")
    return torch.stack(list(components.values()), dim=1)


def _algorithm(value: str | Algorithm) -> Algorithm:
    """`algorithm`, for functions whose own argument has that name."""
    return algorithm(value)


def _estimator(value: str | Algorithm | Estimator) -> Estimator:
    if isinstance(value, Estimator):
        return value
    if isinstance(value, str) and (value in names("advantage") or is_import_path(value)):
        built = lookup("advantage", value)()
        assert isinstance(built, Estimator)
        return built
    if isinstance(value, str) and value not in algorithm_names():
        raise InputError(
            f"unknown algorithm or estimator {value!r}; {nearest(value, [*algorithm_names(), *names('advantage')])}"
        )
    return algorithm(value).advantage


def _dense_group(estimator: Estimator, group: Tensor | None, rows: int) -> Tensor | None:
    if group is None:
        if estimator.needs_groups:
            raise InputError(f"advantage '{estimator.name}' compares responses of one group; pass group=[B] integer ids")
        return None
    return renumber(checks.ids("group", group, rows))


def _signals(
    value: Algorithm,
    like: Tensor,
    tensors: dict[str, Tensor | None],
    *,
    mask: Tensor,
    group: Tensor | None,
    turn: Tensor | None,
    rollout: Tensor | None,
    keep: Tensor | None,
    anchor_side: bool = False,
) -> Signals:
    """Check the tensors of a call and collect them. `anchor_side`: only the signals that counting reads are required."""
    checks.same_device({**tensors, "mask": mask, "group": group, "turn": turn, "rollout": rollout, "keep": keep}, like)
    tokens = checks.mask(mask, like)
    readers = value.objective.needs()
    if anchor_side:
        counted = [f"correction '{part.name}'" for part in value.objective.corrections]
        counted = counted if value.aggregate.denominator == "kept" else []
        if value.objective.ratio.scope is Scope.GROUP:
            counted.append(f"ratio '{value.objective.ratio.name}'")
        readers = {reader: signals for reader, signals in readers.items() if reader in counted}
    if value.objective.ratio.level == "turn" and (readers or not anchor_side):
        readers = {**readers, "turn-level ratio": ("turn",)}
    checks.require_signals(value.name, readers, {**tensors, "turn": turn})
    checked: dict[str, Any] = {
        name: None if tensor is None else checks.per_token(name, tensor, like).detach().to(like.dtype)
        for name, tensor in tensors.items()
        if name not in ("entropy", "values")
    }
    for name in ("entropy", "values"):
        tensor = tensors.get(name)
        checked[name] = None if tensor is None else checks.per_token(name, tensor, like).to(like.dtype)
    keep_mask = None
    if keep is not None:
        keep_mask = checks.zero_one("keep", checks.per_row_or_token("keep", keep, like)).to(like.dtype)
    checks.no_nan({"logprobs": like, **checked}, tokens)
    shift = checked.get("router_shift")
    if shift is not None:
        checks.within_unit("router_shift", shift, tokens)
    mask_ = Mask(tokens, like.dtype)
    return Signals(
        mask=mask_,
        logprobs=like,
        advantages=torch.zeros_like(mask_.lengths),
        keep=keep_mask,
        group=None if group is None else checks.ids("group", group, len(like)),
        turn=None if turn is None else checks.turns(turn, tokens),
        rollout=None if rollout is None else renumber(checks.ids("rollout", rollout, len(like))),
        **checked,
    )


def _advantages(value: Algorithm, advantages: Tensor, signals: Signals) -> Tensor:
    """Advantages [B, 1] or [B, T], 0 outside the mask; InputError if they vary inside a segment that has one ratio."""
    spread = checks.per_row_or_token("advantages", advantages, signals.logprobs).detach().to(signals.dtype)
    per_response = advantages.dim() == 1
    checks.finite("advantages", spread, signals.mask.lengths > 0 if per_response else signals.mask.tokens)
    selected = torch.where(signals.mask.lengths > 0, spread, 0.0) if per_response else signals.mask.select(spread)
    ratio = value.objective.ratio
    if ratio.gradient != "through" or ratio.level == "token" or selected.numel() == 0:
        return selected
    segments = signals.segments(ratio.level)
    mean = segments.mean(selected)
    counted = signals.mask.tokens if selected.shape[1] > 1 or mean.shape[1] > 1 else signals.mask.lengths > 0
    varies = counted & ((selected - mean).abs() > 1e-5 * selected.abs().clamp(min=1e-3))
    if bool(varies.any()):
        row = int(varies.any(1).nonzero()[0, 0])
        raise InputError(
            f"{value.name} takes one advantage per {ratio.level}, but row {row} holds several for one;"
            " use gspo-token for advantages per token, or turn-gspo for advantages per turn"
        )
    # One advantage per response: that of its first token, since a mean would round.
    if per_response or ratio.level == "turn":
        return selected
    first = signals.mask.tokens.to(torch.int8).argmax(1, keepdim=True)
    return torch.where(signals.mask.lengths > 0, selected.gather(1, first), 0.0)


def _require_group(value: Algorithm, group: Tensor | None) -> Tensor:
    if group is None:
        reader = value.objective.needs_groups(value.aggregate)[0]
        raise InputError(f"{value.name} needs group, which its {reader} reads; pass group=[B] integer ids")
    return group


def _group_tables(value: Algorithm, signals: Signals, counts: Counts | None) -> tuple[Signals, int | None]:
    """The signals with dense group ids, and the size of the group tables; (signals, None) if no part uses groups."""
    if not value.objective.needs_groups(value.aggregate):
        return signals, None
    group = _require_group(value, signals.group)
    if counts is None:
        dense = renumber(group)
        return replace(signals, group=dense), int(dense.max()) + 1 if len(dense) else 0
    _, size = checks.dense_ids("group", group, len(group))
    table = counts.all.group_tokens
    if table is None or size > len(table):
        known = "no groups" if table is None else f"{len(table)} groups"
        raise InputError(
            f"group holds the id {size - 1}, but the counts given know {known}; pass the sum of legato.counts over the whole"
            " update, made for the same algorithm with the same ids"
        )
    return signals, len(table)
