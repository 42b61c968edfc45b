"""Selecting the tokens the policy wrote, and summing over them.

Positions outside the mask may hold anything, NaN and inf included, so they are selected away and never multiplied by
zero. On a CPU the selection is a bitwise AND with all-ones or all-zeros words: exact for every bit pattern and, unlike
`torch.where` with a boolean condition, vectorised (`benchmarks/objectives.py` measures it; `torch.where` is the oracle
in the tests and the path on other devices).
"""

from typing import Any

import torch
from torch import Tensor

from legato.core.shapes import PerToken, Spread, TokenMask

_WORD = {torch.float32: torch.int32, torch.float64: torch.int64}


class _SelectBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, words: Tensor) -> Tensor:
        ctx.save_for_backward(words)
        return values.view(words.dtype).bitwise_and(words).view(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (words,) = ctx.saved_tensors
        return gradients[0].view(words.dtype).bitwise_and(words).view(gradients[0].dtype), None


class _DifferenceBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, words: Tensor) -> Tensor:
        ctx.save_for_backward(words)
        difference = left - right
        difference.view(words.dtype).bitwise_and_(words)
        return difference

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None]:
        (words,) = ctx.saved_tensors
        gradient: Tensor = gradients[0]
        if gradient.is_contiguous():
            # In place: no other holder of this gradient reads positions outside the mask.
            gradient.view(words.dtype).bitwise_and_(words)
        else:
            gradient = gradient.view(words.dtype).bitwise_and(words).view(gradient.dtype)
        return gradient, -gradient if ctx.needs_input_grad[1] else None, None


class Mask:
    """The tokens the policy wrote: fixes lengths, sequence ratios and all counts, and is never edited."""

    __slots__ = ("_words", "lengths", "tokens")

    tokens: TokenMask
    lengths: Tensor
    """[B, 1], in the working dtype: the number of mask tokens of each row."""

    def __init__(self, tokens: TokenMask, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self._words: Tensor | None = None
        if tokens.device.type == "cpu":
            self._words = tokens.to(_WORD[dtype]).neg_()
            # int32 holds any length; the default would first copy all words to int64.
            self.lengths = self._words.sum(1, keepdim=True, dtype=torch.int32).neg_().to(dtype)
        else:
            self.lengths = tokens.sum(1, keepdim=True).to(dtype)

    def select(self, values: Spread) -> PerToken:
        """The values inside the mask, exactly 0 outside, even where they are NaN."""
        values = values.expand(self.tokens.shape)
        if self._words is None:
            return torch.where(self.tokens, values, 0.0)
        selected: Tensor = _SelectBits.apply(values, self._words)  # type: ignore[no-untyped-call]
        return selected

    def difference(self, left: PerToken, right: PerToken) -> PerToken:
        """select(left - right) with a single allocation, since allocations are expensive on a CPU."""
        if self._words is None:
            return torch.where(self.tokens, left - right, 0.0)
        selected: Tensor = _DifferenceBits.apply(left, right, self._words)  # type: ignore[no-untyped-call]
        return selected

    def select_(self, values: PerToken) -> PerToken:
        """`select` in place. The caller must be the only holder of the tensor."""
        if self._words is None:
            return values.masked_fill_(~self.tokens, 0.0)
        values.view(self._words.dtype).bitwise_and_(self._words)
        return values

    def sum(self, values: Spread, place: PerToken | None = None) -> Tensor:
        """[B, 1]: the sum over the mask tokens of each row. Values [B, 1] are multiplied by the lengths and not expanded.

        `place`: a tensor to use as scratch space, which may be `values` itself. The result then has no gradient.
        """
        if values.shape[1] == 1 and self.tokens.shape[1] != 1:
            return values * self.lengths
        if place is None or self._words is None:
            return self.select(values).sum(1, keepdim=True)
        torch.bitwise_and(values.view(self._words.dtype), self._words, out=place.view(self._words.dtype))
        return place.sum(1, keepdim=True)
