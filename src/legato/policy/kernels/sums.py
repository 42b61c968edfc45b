"""Backward of `spans.Uses.take`: a deterministic float32 scatter-add."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_uses(source, order, ends, out, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    begin, end = tl.load(ends + row), tl.load(ends + row + 1)
    kind: tl.constexpr = tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([BLOCK], kind)
    for place in range(begin, end):
        total += tl.load(source + tl.load(order + place) * N + columns, mask=inside, other=0.0).to(kind)
    tl.store(out + row.to(tl.int64) * N + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_uses(source: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """[R, ...], whose row r is the sum of the rows order[ends[r] : ends[r + 1]] of `source` [M, ...]."""
    rows = len(ends) - 1
    out = source.new_empty(rows, *source.shape[1:])
    width = out[0].numel() if rows else 0
    block = min(1024, triton.next_power_of_2(max(1, width)))
    if width:
        _sum_uses[(rows, triton.cdiv(width, block))](source, order, ends, out, width, BLOCK=block, num_warps=4)
    return out
