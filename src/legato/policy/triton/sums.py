"""Sums over listed rows of a table, in the order of the list, in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_uses(source, order, ends, out, N, WIDTH: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    # Column (head, w) of the sum comes from columns (head * REPEAT + copy, w) of the source.
    first = columns // WIDTH * (REPEAT * WIDTH) + columns % WIDTH
    begin, end = tl.load(ends + row), tl.load(ends + row + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(begin, end):
        here = source + tl.load(order + place) * (N * REPEAT)
        for copy in tl.static_range(REPEAT):
            total += tl.load(here + first + copy * WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * N + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_uses(source: Tensor, order: Tensor, ends: Tensor, repeat: int = 1) -> Tensor:
    """[R, ...]: row r is the sum of source[order[ends[r] : ends[r + 1]]]; of [M, heads * repeat, W] also over repeats."""
    rows = len(ends) - 1
    shape = source.shape[1:] if repeat == 1 else (source.shape[1] // repeat, *source.shape[2:])
    out = torch.empty(rows, *shape, dtype=source.dtype, device=source.device)
    width = max(1, out[0].numel() if rows else 1)
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        _sum_uses[(rows, triton.cdiv(width, block))](
            source, order, ends, out, width, WIDTH=source.shape[-1], REPEAT=repeat, BLOCK=block, num_warps=4
        )
    return out
