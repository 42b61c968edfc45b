"""How far the experts of a mixture have diverged, and how evenly routers use them, e.g. after upcycling.

Shapes: E experts, K of them a token, N tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.texts import Texts
from legato.errors import InputError
from legato.policy.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Means over the layers that have a router."""

    distance: float
    """Root mean square distance between two experts of a layer, relative to the norm of an expert; 0: all equal."""
    entropy: float
    """Entropy of the router's probabilities per token, as a share of log E; 1: the router has no preference."""
    busiest: float
    """The share of choices that go to the most used expert of a layer; 1 / E at best, 1 / K at worst."""
    idle: float
    """The share of experts that got no token."""

    def __str__(self) -> str:
        return (
            f"experts are {self.distance:.2%} of their norm apart; router entropy {self.entropy:.4f} of the highest; the"
            f" busiest expert of a layer gets {self.busiest:.0%} of the places, {self.idle:.0%} of all experts get none"
        )


def measure_divergence(policy: Policy, texts: Texts) -> Divergence:
    """The divergence of a policy's experts, and their use on the tokens of some texts."""
    mixtures = [layer.mlp for layer in policy.body.get_decoder().layers if hasattr(layer.mlp, "experts")]
    if not mixtures:
        raise InputError(f"{policy.name} is a {type(policy.body).__name__}, in which no layer has experts")
    routed = _record_routes(policy, mixtures, texts)
    used = [usage(logits, chosen) for logits, chosen in routed]
    return Divergence(
        distance=_mean([distance(mixture.experts) for mixture in mixtures]),
        entropy=_mean([entropy for entropy, _ in used]),
        busiest=_mean([float(shares.max()) for _, shares in used]),
        idle=_mean([float((shares == 0).double().mean()) for _, shares in used]),
    )


def distance(experts: Any) -> float:
    """The root mean square distance between pairs of a layer's experts, relative to their norm."""
    apart, size = 0.0, 0.0
    for weight in (_weight(experts, "gate_up_proj"), _weight(experts, "down_proj")):
        flat = weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))
        # Relative to the first expert: a rounded mean would differ from equal copies.
        away = flat - flat[0]
        apart += len(flat) * float(away.square().sum()) - float(away.sum(0).square().sum())
        size += float(flat.square().sum())
    count = len(flat)
    return float((max(0.0, apart) * 2 / (count * (count - 1)) / (size / count)) ** 0.5)


def _weight(experts: Any, name: str) -> Tensor:
    """[E, ...]: the effective weights of the experts, LoRA adapters included."""
    added: Any = 0
    while hasattr(experts, "base_layer"):
        if experts.parameter_name == name:
            added = sum(experts.get_delta_weight(adapter) for adapter in experts.active_adapters)
        experts = experts.base_layer
    weight: Tensor = getattr(experts, name).detach() + added
    return weight.detach()


def usage(logits: Tensor, chosen: Tensor) -> tuple[float, Tensor]:
    """(entropy as a share of log E, share of choices per expert [E]) from a router's logits [N, E] and choices [N, K]."""
    log = logits.double().log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1).mean() / torch.tensor(float(log.shape[1])).log()
    return float(entropy), torch.bincount(chosen.flatten(), minlength=log.shape[1]) / chosen.numel()


def _record_routes(policy: Policy, mixtures: list[Any], texts: Texts) -> list[tuple[Tensor, Tensor]]:
    """Each router's logits [N, E] and choices [N, K] for the tokens of the texts."""
    outputs: list[tuple[Tensor, Tensor]] = []
    hooks = [
        mixture.gate.register_forward_hook(lambda module, inputs, output: outputs.append((output[0].cpu(), output[2].cpu())))
        for mixture in mixtures
    ]
    try:
        policy.score(texts, torch.arange(len(texts.tokens)))
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
