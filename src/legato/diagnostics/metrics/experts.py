"""Router metrics of a mixture of experts: flips, their correlation with the ratios, entropy, load."""

import torch
from torch import Tensor

from legato.core.sums import Correlation, Layered, Load, Mean, Piece
from legato.diagnostics.metrics.inputs import MetricInputs
from legato.diagnostics.metrics.routing import shared_experts


def routing(inputs: MetricInputs) -> dict[str, Piece]:
    """Return the router metrics; empty for a dense policy."""
    router = inputs.signals.router
    if router is None:
        return {}
    pieces: dict[str, Piece] = {
        "router/entropy": inputs.token_mean(router.entropy),
        "router/load": _load(router.experts, inputs.signals.mask.tokens, router.count),
    }
    if router.old is not None:
        flips = _flips("router/", router.old, router.experts, _known_tokens(inputs, router.old_known), pieces)
        _correlations(inputs, flips, pieces)
    if router.sampler is not None and router.trainer is not None:
        _flips("router/mismatch_", router.sampler, router.trainer, _known_tokens(inputs, router.sampler_known), pieces)
    return pieces


def _known_tokens(inputs: MetricInputs, known: Tensor | None) -> Tensor:
    tokens = inputs.signals.mask.tokens
    return tokens if known is None else tokens & known


def _flips(prefix: str, before: Tensor, after: Tensor, where: Tensor, pieces: dict[str, Piece]) -> Tensor:
    """Add how two expert choices differ to `pieces`; return the flip rate [B, T], mean over layers, 0 outside `where`."""
    layers, active = before.shape[-2:]
    dropped = torch.where(where.unsqueeze(-1), active - shared_experts(before, after), 0).float()
    count = where.sum(dtype=torch.float64)
    by_layer, total = dropped.sum((0, 1), dtype=torch.float64) / active, count * layers
    pieces[f"{prefix}flip_mean"] = Mean(by_layer.sum(), total)
    pieces[f"{prefix}flip"] = Layered(by_layer, count.expand(layers))
    pieces[f"{prefix}any_flip"] = Mean(dropped.sign().sum(dtype=torch.float64), total)
    # Of K experts each time, K - g both times: 1 - (K - g) / (K + g).
    pieces[f"{prefix}jaccard"] = Mean((2 * dropped / (active + dropped)).sum(dtype=torch.float64), total)
    return dropped.sum(-1) / (layers * active)


def _correlations(inputs: MetricInputs, flips: Tensor, pieces: dict[str, Piece]) -> None:
    signals = inputs.signals
    if signals.old_logprobs is None:
        return
    moved = signals.log_ratio("old")
    pieces["router/flip_token_correlation"] = _correlation(flips, moved.abs(), inputs.tokens)
    share, jump = (torch.where(inputs.counted, inputs.sequences.mean(x), 0.0) for x in (flips.to(moved.dtype), moved))
    pieces["router/flip_sequence_correlation"] = _correlation(share, jump.abs(), inputs.responses)


def _correlation(x: Tensor, y: Tensor, count: Tensor) -> Correlation:
    """Correlate x and y, which are 0 where they do not count."""
    x, y = x.reshape(-1).double(), y.reshape(-1).double()
    return Correlation(count, x.sum(), y.sum(), x.dot(x), y.dot(y), x.dot(y))


def _load(experts: Tensor, where: Tensor, count: int) -> Load:
    layers = experts.shape[2]
    numbers = experts.long() + torch.arange(0, layers * count, count, device=experts.device).unsqueeze(1)
    weights = where.double()[:, :, None, None].expand_as(experts)
    loads = weights.new_zeros(layers * count).index_add_(0, numbers.reshape(-1), weights.reshape(-1))
    return Load(loads.reshape(layers, count))
