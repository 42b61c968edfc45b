"""Decodes the experts of a mixture by grouped kernels (`kernels/experts.py`) instead of the model's own layers.

Inside `run_grouped` the `forward` of every experts module, and of every router whose rule is known, is replaced. Both are
called as modules all the same, so that the hooks which record routes fire. A router's logits are the model's own product.
There is no backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_EXPERTS = 1024
"""Programs of the kernels hold the counts of all experts."""
_CLAMPED = ("GptOssExperts",)
"""Experts of gpt-oss: gate and up of a column are neighbours, both are clamped."""
_DIVIDED = ("Qwen3MoeTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter")
"""Routers with a softmax over all experts in float32, divided by its sum over the chosen ones if `norm_topk_prob`."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """The modules of a body that grouped kernels replace."""

    experts: tuple[nn.Module, ...]
    routers: tuple[tuple[nn.Module, str], ...]
    """Routers whose gates one kernel makes, with their rule (`kernels.experts.KINDS`); others keep their own forward."""


def find_grouped(body: nn.Module) -> Grouped | str | None:
    """The experts that grouped kernels can run; None if the body has none; the reason if they cannot."""
    experts = [module for module in body.modules() if _holds_experts(module)]
    if not experts:
        return None
    for module in experts:
        if (reason := why_not_grouped(module)) is not None:
            return reason
    routers = ((module, _gates_kind(module)) for module in body.modules())
    return Grouped(tuple(experts), tuple((module, kind) for module, kind in routers if kind is not None))


def why_not_grouped(experts: Any) -> str | None:
    """Why the kernels cannot run an experts module; None if they can."""
    name = type(experts).__name__
    weights = [experts.gate_up_proj, experts.down_proj]
    if _has_bias(experts):
        weights += [experts.gate_up_proj_bias, experts.down_proj_bias]
    if not all(type(weight) in (Tensor, nn.Parameter) for weight in weights):
        return f"the weights of {name} are not plain tensors"
    dtype = weights[0].dtype
    if dtype not in _DTYPES or any(weight.dtype != dtype for weight in weights):
        return f"the weights of {name} are in {str(dtype).removeprefix('torch.')}"
    if "forward" in vars(experts):
        return f"the forward of {name} was replaced"
    if getattr(experts, "_is_expert_parallel", False):
        return "experts are divided among devices"
    if not getattr(experts, "has_gate", True) or getattr(experts, "has_post_expert_norm", False):
        return f"{name} is not gate, up and down"
    if len(weights[0]) > MOST_EXPERTS:
        return f"it has {len(weights[0])} experts; at most {MOST_EXPERTS} are supported"
    if name in _CLAMPED:
        return None
    if not _has_plain_gate(experts):
        return f"{name} has a gate of its own"
    activation = type(getattr(experts, "act_fn", None)).__name__
    return None if activation in ("SiLU", "SiLUActivation") else f"its activation is {activation}"


@contextmanager
def run_grouped(grouped: Grouped | None) -> Iterator[None]:
    """Inside, the experts and routers of `grouped` run through kernels; None: nothing changes."""
    if grouped is None:
        yield
        return
    changed: list[Any] = [*grouped.experts, *(router for router, _ in grouped.routers)]
    for experts in grouped.experts:
        experts.forward = partial(_run_experts, experts)
    for router, kind in grouped.routers:
        router.forward = partial(_run_router, router, kind)
    try:
        yield
    finally:
        for module in changed:
            del module.forward  # the one of its class again


def _holds_experts(module: Any) -> bool:
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def _has_bias(experts: Any) -> bool:
    # Versions of transformers without this attribute have biases in gpt-oss alone.
    return bool(getattr(experts, "has_bias", type(experts).__name__ in _CLAMPED))


def _has_plain_gate(experts: Any) -> bool:
    """Whether the gate is transformers' default: the first half of the outputs, activated, times the second half."""
    own = getattr(type(experts), "_apply_gate", None)
    return own is None or own.__name__ == "_default_apply_gate"


def _gates_kind(router: Any) -> str | None:
    """The rule of a router's gates (`kernels.experts.KINDS`); None if it is none of the known routers."""
    name = type(router).__name__
    weight: Any = getattr(router, "weight", None)
    if "forward" in vars(router) or type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in _DTYPES:
        return None
    if name in _DIVIDED:
        return "all, divided" if router.norm_topk_prob else "all"
    return {"MixtralTopKRouter": "all, divided", "GptOssTopKRouter": "chosen"}.get(name)


def _run_experts(experts: Any, hidden: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    from legato.policy.kernels.experts import Weights, apply_experts

    gate_up, down, clamped = experts.gate_up_proj, experts.down_proj, type(experts).__name__ in _CLAMPED
    if getattr(experts, "is_transposed", clamped):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biased = _has_bias(experts)
    weights = Weights(
        gate_up=gate_up.detach(),
        down=down.detach(),
        gate_up_bias=experts.gate_up_proj_bias.detach() if biased else None,
        down_bias=experts.down_proj_bias.detach() if biased else None,
        interleaved=clamped,
        clamp=(float(experts.alpha), float(experts.limit)) if clamped else None,
    )
    return apply_experts(hidden.contiguous(), chosen.contiguous(), gates.contiguous(), weights)


def _run_router(router: Any, kind: str, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, gates and experts, as the router's own forward returns them."""
    from legato.policy.kernels.experts import route

    logits = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
    # Mixtral's gates stay in float32.
    dtype = torch.float32 if type(router).__name__ == "MixtralTopKRouter" else logits.dtype
    return logits, *route(logits, router.top_k, kind, dtype)
