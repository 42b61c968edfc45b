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
        "router/load": Load(_counts(router.experts, sight.signals.mask.tokens, router.count)),
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
    layers, active = before.shape[-2:]
    shared = shared_experts(before, after)
    # All three are functions of how many experts are shared: the token-layers are counted by that, layer by layer.
    counted = _counts(shared.unsqueeze(-1), where, active + 1)
    both = torch.arange(active + 1, dtype=torch.float64, device=counted.device)
    flipped = counted @ (1 - both / active)
    total, count = counted.sum(), counted.sum(1)
    pieces[f"{prefix}flip_mean"] = Mean(flipped.sum(), total)
    pieces[f"{prefix}flip"] = Layered(flipped, count)
    pieces[f"{prefix}any_flip"] = Mean(total - counted[:, active].sum(), total)
    pieces[f"{prefix}jaccard"] = Mean((counted @ (1 - both / (2 * active - both))).sum(), total)
    return 1 - shared.sum(-1) / (layers * active)


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


def _counts(numbers: Tensor, where: Tensor, size: int) -> Tensor:
    """[M, size] float64: how often each number stands in a layer of [B, T, M, n], over the tokens that count."""
    layers = numbers.shape[2]
    # What does not count goes to a layer of its own behind the others.
    layer = torch.where(where.unsqueeze(-1), torch.arange(layers, device=where.device), layers).unsqueeze(-1)
    places = (numbers.long() + layer * size).reshape(-1)
    found = torch.zeros((layers + 1) * size, dtype=torch.float64, device=where.device)
    found.index_add_(0, places, found.new_ones(1).expand(len(places)))
    return found.reshape(layers + 1, size)[:layers]
