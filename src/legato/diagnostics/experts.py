"""What the routers of a mixture of experts did in an update: flips, their correlation with the ratios, entropy, load."""

import torch
from torch import Tensor

from legato.core.sums import Correlation, Layered, Load, Mean, Piece
from legato.diagnostics.routing import shared_experts
from legato.diagnostics.sight import Sight


def routing(sight: Sight) -> dict[str, Piece]:
    """All that is known of the routers; nothing for a dense policy."""
    router = sight.signals.router
    if router is None:
        return {}
    pieces: dict[str, Piece] = {
        "router/entropy": sight.token_mean(router.entropy),
        "router/load": _load(router.experts, sight.signals.mask.tokens, router.count),
    }
    if router.old is not None:
        flips = _flips("router/", router.old, router.experts, _where(sight, router.old_known), pieces)
        _correlations(sight, flips, pieces)
    if router.sampler is not None and router.trainer is not None:
        _flips("router/mismatch_", router.sampler, router.trainer, _where(sight, router.sampler_known), pieces)
    return pieces


def _where(sight: Sight, known: Tensor | None) -> Tensor:
    tokens = sight.signals.mask.tokens
    return tokens if known is None else tokens & known


def _flips(prefix: str, before: Tensor, after: Tensor, where: Tensor, pieces: dict[str, Piece]) -> Tensor:
    """Measures of how two choices differ; [B, T] the flip rate of each token, mean over the layers."""
    active = before.shape[-1]
    shared = shared_experts(before, after).to(torch.float32)
    inside = where.unsqueeze(-1)
    flips = torch.where(inside, 1 - shared / active, 0.0)
    count = where.sum(dtype=torch.float64)
    layers = flips.shape[-1]
    by_layer = flips.sum(dim=(0, 1), dtype=torch.float64)
    any_flip = torch.where(inside, (shared < active).to(flips.dtype), 0.0)
    distance = torch.where(inside, 1 - shared / (2 * active - shared), 0.0)
    pieces[f"{prefix}flip_mean"] = Mean(by_layer.sum(), count * layers)
    pieces[f"{prefix}flip"] = Layered(by_layer, count.expand(layers))
    pieces[f"{prefix}any_flip"] = Mean(any_flip.sum(dtype=torch.float64), count * layers)
    pieces[f"{prefix}jaccard"] = Mean(distance.sum(dtype=torch.float64), count * layers)
    return flips.mean(-1)


def _correlations(sight: Sight, flips: Tensor, pieces: dict[str, Piece]) -> None:
    signals = sight.signals
    if signals.old_logprobs is None:
        return
    moved = signals.log_ratio("old")
    pieces["router/flip_token_correlation"] = _correlation(flips, moved.abs(), signals.mask.tokens)
    jump = sight.sequences.mean(moved).abs()
    share = sight.sequences.mean(flips.to(moved.dtype))
    pieces["router/flip_sequence_correlation"] = _correlation(share, jump, sight.counted)


def _correlation(x: Tensor, y: Tensor, where: Tensor) -> Correlation:
    x, y = (torch.where(where, value, 0.0).double() for value in (x, y))
    return Correlation(where.sum().double(), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum())


def _load(experts: Tensor, where: Tensor, count: int) -> Load:
    layers = experts.shape[2]
    numbers = experts.long() + torch.arange(layers, device=experts.device)[:, None] * count
    weights = where[:, :, None, None].expand(experts.shape).reshape(-1).to(torch.float64)
    counted = weights.new_zeros(layers * count).index_add_(0, numbers.reshape(-1), weights)
    return Load(counted.reshape(layers, count))
