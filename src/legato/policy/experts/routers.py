"""Finds the routers of a mixture of experts among the modules of its body, and the rule of its gates.

For N tokens, a router of transformers returns the logits of all E experts and the gates and numbers of the K active ones.
Families compute gates in different ways: a softmax over all experts, divided by its sum over the chosen experts (Qwen3-MoE,
Mixtral) or not (OLMoE, Qwen2-MoE as published), or a softmax over the chosen experts alone (gpt-oss). The rule is found by
running a copy of the router; a router that matches no rule to the bit is unsupported.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

Gates = Callable[[Tensor, Tensor], Tensor]
"""(logits [N, E], experts [N, K]) -> the gates [N, K] of those experts, as the family makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of a body, one for each layer with experts, from the first layer to the last."""

    modules: tuple[nn.Module, ...]
    experts: int
    """E"""
    active: int
    """K"""
    gates: Gates

    @property
    def index(self) -> torch.dtype:
        """The dtype that stores the number of an expert."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K): layers with a router, and active experts."""
        return len(self.modules), self.active


def find_routers(body: Any) -> Routers | str | None:
    """The routers of a causal language model; None if it has no experts; a reason if its routers are unsupported."""
    modules = list(body.modules())
    routers = [module for module in modules if _is_router(module)]
    if not routers:
        if not _has_experts(body, modules):
            return None
        kinds_of_module = Counter(type(module).__name__ for module in modules)
        return f"no router was found among its modules: {', '.join(sorted(kinds_of_module))}"
    first: Any = routers[0]
    kinds = {(type(module).__name__, *_sizes(module)) for module in routers}
    if len(kinds) > 1:
        return f"its routers differ: {', '.join(map(str, sorted(kinds)))}"
    gates = _gates_of(first)
    if gates is None:
        return (
            f"{type(first).__name__} does not give logits, gates and experts whose gates are a softmax over all experts or"
            " over the chosen ones"
        )
    experts, active = _sizes(first)
    return Routers(modules=tuple(routers), experts=experts, active=active, gates=gates)


def _is_router(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("Router") and isinstance(getattr(module, "top_k", None), int)
    return named and isinstance(weight, Tensor) and weight.dim() == 2


def _sizes(router: Any) -> tuple[int, int]:
    return int(router.weight.shape[0]), int(router.top_k)


def _has_experts(body: Any, modules: list[Any]) -> bool:
    config = body.config
    claimed = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return any(isinstance(count, int) and count > 1 for count in claimed) or any(
        isinstance(getattr(module, "experts", None), nn.Module) for module in modules
    )


def _softmax_in_float32(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32)


def _softmax_of_float32(logits: Tensor) -> Tensor:
    return torch.softmax(logits.float(), dim=-1)


def _softmax_as_is(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1)


def _gate_function(probabilities: Callable[[Tensor], Tensor], *, over: str, cast: bool) -> Gates:
    """A rule for gates: softmax over the "chosen" experts, over "all", or over "all, divided" by the chosen sum."""

    def gates(logits: Tensor, experts: Tensor) -> Tensor:
        chosen = over == "chosen"
        shares = probabilities(logits.gather(-1, experts)) if chosen else probabilities(logits).gather(-1, experts)
        if over == "all, divided":
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares.to(logits.dtype) if cast else shares

    return gates


def _gates_of(router: Any) -> Gates | None:
    """The rule that reproduces, to the bit, the gates of copies of the router with random weights; None if no rule does.

    In 16 bits the rules hardly differ, and in 32 bits a cast does not show: both dtypes are tried.
    """
    # A router with another signature is unsupported, not an error.
    try:
        trials = [_run_trial(router, dtype) for dtype in {torch.float32, router.weight.dtype}]
        wide, plain = (
            (_softmax_in_float32, _softmax_of_float32, _softmax_as_is),
            (_softmax_as_is, _softmax_in_float32, _softmax_of_float32),
        )
        # Rules with equal forwards may differ in a 16-bit backward: each family's own softmax is tried first.
        for (over, softmaxes), cast in product((("all, divided", wide), ("all", wide), ("chosen", plain)), (True, False)):
            for probabilities in softmaxes:
                gates = _gate_function(probabilities, over=over, cast=cast)
                if all(_equal(gates(logits, experts), scores) for logits, scores, experts in trials):
                    return gates
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
        return None
    return None


@torch.no_grad()
def _run_trial(router: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, gates and experts that a copy of the router with random weights returns for random tokens."""
    trial: Any = copy.deepcopy(router).to(dtype)
    source = torch.Generator().manual_seed(0)
    for parameter in trial.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=source))
    width = trial.weight.shape[1]
    logits, scores, experts = trial((torch.randn(256, width, generator=source) / width**0.5).to(trial.weight))
    return logits, scores, experts


def _equal(gates: Tensor, expected: Tensor) -> bool:
    return gates.dtype == expected.dtype and torch.equal(gates, expected)
