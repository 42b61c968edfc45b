"""A bound with zero gradient beyond it: the primitive behind every clip and every limit on a log-ratio."""

from typing import Any

import torch
from torch import Tensor

from legato.core.mask import Mask
from legato.core.shapes import PerToken, Scalar, Spread, SpreadMask


def as_bound(bound: Tensor | float, like: Tensor) -> Tensor:
    """The bound as a tensor like `like`. A number is filled in on the device: the host would wait for a copy."""
    return bound.to(like) if isinstance(bound, Tensor) else like.new_full((), bound)


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, lower: Tensor | float | None, upper: Tensor | float | None) -> Tensor:
        if isinstance(lower, Tensor) or isinstance(upper, Tensor):
            bounded = values
            for limit, bound in ((torch.minimum, upper), (torch.maximum, lower)):
                if bound is not None:
                    # Allocations are expensive on a CPU: the second bound is applied in place.
                    place = None if bounded is values else bounded
                    bounded = limit(bounded, as_bound(bound, values), out=place)
        else:
            bounded = values.clamp(lower, upper)
        ctx.save_for_backward(values, bounded)
        return bounded

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        values, bounded = ctx.saved_tensors
        # Comparing into a float tensor is vectorised on CPUs; comparing into a bool and multiplying is six times slower.
        inside = torch.eq(values, bounded, out=torch.empty_like(values))
        return inside.mul_(gradients[0]), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor, mask: Mask) -> Tensor:
        ctx.weights = weights
        return torch.dot(mask.select(values).reshape(-1), weights.reshape(-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return ctx.weights.mul_(gradients[0]), None, None


def weighted_sum(values: PerToken, weights: PerToken, mask: Mask) -> Scalar:
    """The sum over mask tokens of values * weights. `weights` is overwritten: its memory becomes the gradient."""
    total: Tensor = _WeightedSum.apply(values, mask.select_(weights), mask)  # type: ignore[no-untyped-call]
    return total


class _ExponentialSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exponent: Tensor, factor: Tensor, mask: Mask) -> Tensor:
        value = mask.select_(exponent.exp())
        ctx.value, ctx.factor = value, factor
        if factor.shape[1] == 1:
            return (value.sum(1, keepdim=True) * factor).sum()
        return torch.dot(value.reshape(-1), factor.reshape(-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        # Nothing else holds the value and nothing reads it again: its memory becomes the gradient.
        return ctx.value.mul_(ctx.factor * gradients[0]), None, None


def exponential_sum(exponent: PerToken, factor: Spread, mask: Mask) -> Scalar:
    """The sum over mask tokens of exp(exponent) * factor, with one allocation. Its backward can run only once."""
    total: Tensor = _ExponentialSum.apply(exponent, factor, mask)  # type: ignore[no-untyped-call]
    return total


class _RowMeans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exponent: Tensor, factor: Tensor, mask: Mask) -> Tensor:
        lengths = mask.lengths.clamp(min=1)
        terms = mask.select_(exponent.exp()).mul_(factor * mask.lengths)
        ctx.terms, ctx.lengths = terms, lengths
        first = terms.gather(1, mask.tokens.to(torch.uint8).argmax(1, keepdim=True))
        first = torch.where(first.isfinite(), first, 0.0)  # inf - inf would be NaN
        return (first + mask.difference(terms, first.expand_as(terms)).sum(1, keepdim=True) / lengths).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        # As in `exponential_sum`: the memory of the terms becomes the gradient.
        return ctx.terms.div_(ctx.lengths).mul_(gradients[0]), None, None


def sum_of_row_means(exponent: PerToken, factor: Spread, mask: Mask) -> Scalar:
    """`exponential_sum` in the order of a ratio per row: the terms of a row times its length, then their mean.

    The mean is taken of differences from the row's first term. If all terms of a row are equal, value and gradient have the
    bits of exp(exponent) * (factor * length) computed once for the row, as `gspo` does. Its backward can run only once.
    """
    if exponent.shape[1] == 0:
        return exponential_sum(exponent, factor, mask)  # rows without tokens have no first term
    total: Tensor = _RowMeans.apply(exponent, factor, mask)  # type: ignore[no-untyped-call]
    return total


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
    if values.device.type == "cpu" and not isinstance(lower, Tensor) and not isinstance(upper, Tensor) and values.numel():
        # Checking is cheaper than clamping: a limit that no value reaches costs one read and no allocation.
        least, most = torch.aminmax(values.detach())
        if (lower is None or bool(least >= lower)) and (upper is None or bool(most <= upper)):
            return values
    if values.shape[1] == 1:
        values = values.expand(-1, max(b.shape[1] if isinstance(b, Tensor) else 1 for b in (lower, upper)))
    result: Tensor = _Bounded.apply(values, lower, upper)  # type: ignore[no-untyped-call]
    return result
