"""The routers of a mixture of experts, found among the modules of its body.

A router of transformers gives, for N tokens, the logits of all E experts, the gates of the K it activates and which they
are. Families make gates of logits in different ways: a softmax over all experts before the choice, divided by the sum over
the chosen (Qwen3-MoE, Mixtral) or not (OLMoE, Qwen2-MoE as published), or a softmax over the chosen alone (gpt-oss). Which
one it is, is found out by running a copy of the router; one that does none of them to the bit is not known.
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
        """What holds the number of an expert."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K): what a token has of each record."""
        return len(self.modules), self.active


def find_routers(body: Any) -> Routers | str | None:
    """The routers of a causal language model; None: it has no experts; a sentence: it has, but they are not known."""
    modules = list(body.modules())
    found = [module for module in modules if _looks_like_one(module)]
    if not found:
        if not _has_experts(body, modules):
            return None
        seen = Counter(type(module).__name__ for module in modules)
        return f"no router was found among its modules: {', '.join(sorted(seen))}"
    first: Any = found[0]
    kinds = {(type(module).__name__, *_sizes(module)) for module in found}
    if len(kinds) > 1:
        return f"its routers differ: {', '.join(map(str, sorted(kinds)))}"
    gates = _gates_of(first)
    if gates is None:
        return (
            f"{type(first).__name__} does not give logits, gates and experts whose gates are a softmax over all experts or"
            " over the chosen ones"
        )
    experts, active = _sizes(first)
    return Routers(modules=tuple(found), experts=experts, active=active, gates=gates)


def _looks_like_one(module: Any) -> bool:
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


def _in_float32(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32)


def _of_float32(logits: Tensor) -> Tensor:
    return torch.softmax(logits.float(), dim=-1)


def _as_it_is(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1)


def _gate_function(probabilities: Callable[[Tensor], Tensor], *, over: str, cast: bool) -> Gates:
    def gates(logits: Tensor, experts: Tensor) -> Tensor:
        chosen = over == "chosen"
        found = probabilities(logits.gather(-1, experts)) if chosen else probabilities(logits).gather(-1, experts)
        if over == "all, divided":
            found = found / found.sum(dim=-1, keepdim=True)
        return found.to(logits.dtype) if cast else found

    return gates


def _gates_of(router: Any) -> Gates | None:
    """The way of making gates that gives those of copies of the router with random weights, to the bit.

    In 16 bits the ways are hardly ever told apart, and in 32 bits it is not seen which of them casts: both are tried.
    """
    # A contract of another kind is no error here: it is what is asked for.
    try:
        seen = [_trial(router, dtype) for dtype in {torch.float32, router.weight.dtype}]
        wide, plain = (_in_float32, _of_float32, _as_it_is), (_as_it_is, _in_float32, _of_float32)
        # Where the forward does not tell, the backward of 16 bits would: each family's own softmax is tried first.
        for (over, softmaxes), cast in product((("all, divided", wide), ("all", wide), ("chosen", plain)), (True, False)):
            for probabilities in softmaxes:
                gates = _gate_function(probabilities, over=over, cast=cast)
                if all(_equal(gates(logits, experts), scores) for logits, scores, experts in seen):
                    return gates
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
        return None
    return None


@torch.no_grad()
def _trial(router: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What a copy of the router says of some random tokens."""
    trial: Any = copy.deepcopy(router).to(dtype)
    source = torch.Generator().manual_seed(0)
    for parameter in trial.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=source))
    width = trial.weight.shape[1]
    logits, scores, experts = trial((torch.randn(256, width, generator=source) / width**0.5).to(trial.weight))
    return logits, scores, experts


def _equal(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)
