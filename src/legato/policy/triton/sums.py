"""Rows of two tables taken by number, heads repeated; and the way back: sums over takings and repeats, in one order.

Keys and values always go together, so each kernel does both: with thousands of launches the host is the slower one.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _take(first, second, index, first_out, second_out, N, WIDTH: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    source = tl.load(index + row) * N + columns
    # Column (head, w) goes to columns (head * REPEAT + copy, w).
    target = row * N * REPEAT + columns // WIDTH * (REPEAT * WIDTH) + columns % WIDTH
    a = tl.load(first + source, mask=inside)
    b = tl.load(second + source, mask=inside)
    for copy in tl.static_range(REPEAT):
        tl.store(first_out + target + copy * WIDTH, a, mask=inside)
        tl.store(second_out + target + copy * WIDTH, b, mask=inside)


@triton.jit
def _sum_uses(first, second, order, ends, first_out, second_out, N, WIDTH: tl.constexpr, REPEAT: tl.constexpr,
              BLOCK: tl.constexpr, BOTH: tl.constexpr):
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    # Column (head, w) of the sum comes from columns (head * REPEAT + copy, w) of the source.
    where = columns // WIDTH * (REPEAT * WIDTH) + columns % WIDTH
    begin, end = tl.load(ends + row), tl.load(ends + row + 1)
    kind: tl.constexpr = tl.float64 if first.dtype.element_ty == tl.float64 else tl.float32
    a = tl.zeros([BLOCK], kind)
    b = tl.zeros([BLOCK], kind)
    for place in range(begin, end):
        here = tl.load(order + place) * (N * REPEAT)
        for copy in tl.static_range(REPEAT):
            a += tl.load(first + here + where + copy * WIDTH, mask=inside, other=0.0).to(kind)
            if BOTH:
                b += tl.load(second + here + where + copy * WIDTH, mask=inside, other=0.0).to(kind)
    target = row.to(tl.int64) * N + columns
    tl.store(first_out + target, a.to(first_out.dtype.element_ty), mask=inside)
    if BOTH:
        tl.store(second_out + target, b.to(second_out.dtype.element_ty), mask=inside)


def take(first: Tensor, second: Tensor, index: Tensor, repeat: int = 1) -> tuple[Tensor, Tensor]:
    """[M, heads * repeat, W] each from [N, heads, W]: row m is row index[m], each head `repeat` times."""
    assert first.shape == second.shape, f"{tuple(first.shape)} and {tuple(second.shape)}"
    rows, (_, heads, width) = len(index), first.shape
    out = [first.new_empty(rows, heads * repeat, width) for _ in range(2)]
    block = min(1024, triton.next_power_of_2(heads * width))
    if rows:
        _take[(rows, triton.cdiv(heads * width, block))](
            first, second, index, *out, heads * width, WIDTH=width, REPEAT=repeat, BLOCK=block, num_warps=4
        )
    return out[0], out[1]


def sum_uses(
    first: Tensor, second: Tensor | None, order: Tensor, ends: Tensor, repeat: int = 1
) -> tuple[Tensor, Tensor | None]:
    """[R, ...] each: row r is the sum of rows order[ends[r] : ends[r + 1]]; of [M, heads * repeat, W] also over repeats."""
    rows = len(ends) - 1
    shape = first.shape[1:] if repeat == 1 else (first.shape[1] // repeat, *first.shape[2:])
    out = [first.new_empty(rows, *shape) for _ in range(1 if second is None else 2)]
    width = max(1, out[0][0].numel() if rows else 1)
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        _sum_uses[(rows, triton.cdiv(width, block))](
            first, first if second is None else second, order, ends, out[0], out[-1], width, WIDTH=first.shape[-1],
            REPEAT=repeat, BLOCK=block, BOTH=second is not None, num_warps=4,
        )  # fmt: skip
    return out[0], None if second is None else out[1]
