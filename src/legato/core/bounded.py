"""A bound with zero gradient beyond it, the one primitive behind every clip and every limit on a log-ratio."""

from typing import Any

import torch
from torch import Tensor

from legato.core.shapes import Spread, SpreadMask


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, lower: Tensor | float | None, upper: Tensor | float | None) -> Tensor:
        bounded = values
        for limit, bound in ((torch.minimum, upper), (torch.maximum, lower)):
            if bound is not None:
                bounded = limit(bounded, torch.as_tensor(bound, dtype=values.dtype, device=values.device))
        ctx.save_for_backward(values, bounded)
        return bounded

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        values, bounded = ctx.saved_tensors
        # Comparing into a float tensor is vectorised on CPUs; comparing into a bool and multiplying is six times slower.
        inside = torch.eq(values, bounded, out=torch.empty_like(values))
        return inside.mul_(gradients[0]), None, None


def choose(condition: SpreadMask, where: Tensor | float, elsewhere: float) -> Tensor:
    """`where` the condition holds, else `elsewhere`. Two plain numbers give float64: `torch.where` would round them to
    float32, and 1.05 or log1p(4e-4) with them."""
    if isinstance(where, Tensor):
        return torch.where(condition, where, elsewhere)
    chosen = torch.full(condition.shape, elsewhere, device=condition.device, dtype=torch.float64)
    return chosen.masked_fill_(condition, where)


def bounded(values: Spread, lower: Tensor | float | None, upper: Tensor | float | None) -> Spread:
    """min(max(values, lower), upper): gradient 1 inside (bounds included), exactly 0 beyond. None is no bound.

    >>> x = torch.tensor([[-2.0, 0.5, 2.0]], requires_grad=True)
    >>> bounded(x, -1.0, 1.0).sum().backward()
    >>> x.grad
    tensor([[0., 1., 0.]])
    """
    if lower is None and upper is None:
        return values
    shapes = [values.shape, *(b.shape for b in (lower, upper) if isinstance(b, Tensor))]
    values = values.expand(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    result: Tensor = _Bounded.apply(values, lower, upper)  # type: ignore[no-untyped-call]
    return result
