"""Matrix products in which a row has the same bits whatever the batch.

cuBLAS chooses a kernel by the size of a product. With few rows and many inputs it splits the sum over the inputs among
multiprocessors, and then the bits of a row depend on how many rows are beside it. From some number of rows on it does not.
`linear` pads smaller products to that number, which is measured once for each shape: a product of few rows is bound by
reading its weight, so padding costs next to nothing.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import pad

MOST_PADDED = 1024
"""Products are padded to at most so many rows; one that needs more is not exact."""
_PACK = 16384
"""Rows of the product that all others are compared with."""
_SIZES = (*range(1, 513), *(int(512 * 1.09**step) | 1 for step in range(1, 40)), *range(576, _PACK, 192))
"""Numbers of rows that are compared: all up to 512, then odd ones and multiples of 64, among them those of buckets."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias for x [R, inputs]; every row has the bits that it has in any other batch."""
    rows = len(x)
    if rows >= MOST_PADDED:
        return plain_linear(x, weight, bias)
    missing = (least_rows(weight, bias is not None) or 0) - rows
    if missing <= 0:
        return plain_linear(x, weight, bias)
    return plain_linear(pad(x, (0, 0, 0, missing)), weight, bias)[:rows]


def project_alike(module: Any, x: Tensor) -> Tensor:
    """The output of a plain linear layer, as `linear`; any other module, or one with hooks, is called."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        output: Tensor = module(x)
        return output
    return linear(x, module.weight, module.bias)


def least_rows(weight: Tensor, bias: bool) -> int | None:
    """From how many rows on the bits of a row do not depend on the batch; None if that is above `MOST_PADDED`."""
    if not weight.is_cuda:
        return 0
    return _measure_least_rows(weight.device, weight.dtype, (weight.shape[0],), weight.shape[1], bias)


def least_rows_joined(weight: Tensor, outputs: tuple[int, ...], bias: bool) -> int | None:
    """From how many rows on one product with a joined weight has the bits of separate ones; None if it never was equal."""
    if not weight.is_cuda:
        return None
    return _measure_least_rows(weight.device, weight.dtype, outputs, weight.shape[1], bias)


@functools.cache
def _measure_least_rows(
    device: torch.device, dtype: torch.dtype, outputs: tuple[int, ...], inputs: int, bias: bool
) -> int | None:
    """From how many rows on one product has the bits of separate ones of these `outputs` in a pack."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    with torch.no_grad():
        x, weight = random(_PACK, inputs), random(sum(outputs), inputs) * inputs**-0.5
        added = random(sum(outputs)) if bias else None
        sizes = list(outputs)
        biases = [None] * len(sizes) if added is None else torch.split(added, sizes)
        separate = [plain_linear(x, *pair) for pair in zip(torch.split(weight, sizes), biases, strict=True)]
        whole = separate[0] if len(separate) == 1 else torch.cat(separate, 1)
        del separate
        # Rows from the middle as well: a row of a pack has other neighbours than in decoding.
        starts = [(1037 * size) % (_PACK - size) // 8 * 8 for size in _SIZES]
        differ = [
            (plain_linear(x[at : at + size], weight, added) != whole[at : at + size]).any()
            for size, at in zip(_SIZES, starts, strict=True)
        ]
        unequal = [size for size, differs in zip(_SIZES, torch.stack(differ).tolist(), strict=True) if differs]
    least = max(unequal, default=0) + 1
    return least if least <= MOST_PADDED else None
