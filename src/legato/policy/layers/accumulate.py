"""Gradients that a backward written by hand adds where they lie, in the dtype they are kept in (float32 for 16 bits)."""

import torch
from torch import Tensor


def add_product(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """weight.grad += left right, in the dtype its gradient is kept in, without a second matrix of that size."""
    dtype = weight.grad_dtype or weight.dtype
    if dtype == left.dtype:
        weight.grad = torch.mm(left, right) if weight.grad is None else weight.grad.addmm_(left, right)
    elif weight.grad is None:
        weight.grad = torch.mm(left, right, out_dtype=dtype)
    else:
        torch.addmm(weight.grad, left, right, out_dtype=dtype, out=weight.grad)


def add_gradient(weight: Tensor, gradient: Tensor) -> None:
    """weight.grad += gradient."""
    if weight.grad is None:
        weight.grad = gradient.to(weight.grad_dtype or weight.dtype)
    else:
        weight.grad += gradient
