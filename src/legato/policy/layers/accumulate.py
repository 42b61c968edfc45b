"""In-place gradient accumulation for hand-written backwards, in the dtype of `.grad` (float32 for 16-bit weights)."""

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn


def may_write_gradients(weights: Iterable[Tensor | None], *modules: nn.Module) -> bool:
    """Whether a hand-written backward may add to the `.grad` of these weights itself.

    It must leave that to autograd if a weight has hooks, is not a plain tensor (DTensor, quantised), or belongs to a module
    of FSDP1, which learns of gradients from autograd. FSDP2 reads `.grad` of the gathered weights after the backward of a
    layer. `modules`: the module that holds the weights, and the modules that contain it.
    """
    for module in modules:
        if _has_base(cast(Any, type(module)), "FullyShardedDataParallel"):
            return False
    return all([weight is None or not weight.requires_grad or _is_free(weight) for weight in weights])  # noqa: C419


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 divides weights of a module among ranks. It must be called as a module, so that its hooks fire."""
    return _has_base(cast(Any, type(module)), "FSDPModule")


def own_class(module: nn.Module) -> Any:
    """The class of a module; that from before FSDP2 put a subclass in its place."""
    kind: Any = type(module)
    return kind.__bases__[-1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


@functools.lru_cache
def _has_base(kind: Any, name: str) -> bool:
    # Compared by name: importing the packages that shard takes a while, and a module that is not sharded needs none.
    return any(base.__name__ == name for base in kind.__mro__)


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
