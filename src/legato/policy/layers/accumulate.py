"""In-place gradient accumulation for hand-written backwards, in the dtype of `.grad` (float32 for 16-bit weights)."""

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


def may_write_gradients(weights: Iterable[Tensor | None], *modules: nn.Module) -> bool:
    """Whether a hand-written backward may add to the `.grad` of these weights itself.

    It must leave that to autograd if a weight has hooks, is not a plain tensor (DTensor, quantised), or belongs to a module
    that shards its weights. `modules`: the module that holds the weights, and the modules that contain it.
    """
    for module in modules:
        if _is_sharded(cast(Any, type(module))):
            return False
    return all([weight is None or not weight.requires_grad or _is_free(weight) for weight in weights])  # noqa: C419


@functools.lru_cache
def _is_sharded(kind: Any) -> bool:
    # Compared by name: importing the packages that shard takes a while, and a module that is not sharded needs none.
    return any(base.__name__ in _SHARDED for base in kind.__mro__)


def _is_free(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter or type(weight) is Tensor
    return plain and not weight._backward_hooks and not getattr(weight, "_post_accumulate_grad_hooks", None)


def add_product(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """weight.grad += left @ right, in the dtype of the gradient, without a second matrix of that size."""
    if weight.grad is None:
        weight.grad = product(weight, left, right)
    elif weight.grad.dtype == left.dtype:
        weight.grad.addmm_(left, right)
    else:
        torch.addmm(weight.grad, left, right, out_dtype=weight.grad.dtype, out=weight.grad)


def product(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in the dtype of the gradient of `weight`."""
    dtype = weight.grad_dtype or weight.dtype
    return torch.mm(left, right) if dtype == left.dtype else torch.mm(left, right, out_dtype=dtype)


def add_gradient(weight: Tensor, gradient: Tensor) -> None:
    """weight.grad += gradient."""
    if weight.grad is None:
        weight.grad = gradient.to(weight.grad_dtype or weight.dtype)
    else:
        weight.grad += gradient
