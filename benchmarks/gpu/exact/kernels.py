"""A product in tiles of any size, under trial. The attention that was tried is `legato/policy/kernels/exact.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _product(x, weight, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, columns = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        a = tl.load(x + rows.to(tl.int64)[:, None] * K + inner[None, :],
                    mask=(rows < M)[:, None] & (inner < K)[None, :], other=0.0)
        b = tl.load(weight + columns.to(tl.int64)[:, None] * K + inner[None, :],
                    mask=(columns < N)[:, None] & (inner < K)[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def product(x: Tensor, weight: Tensor, *, tile: tuple[int, int], warps: int = 4, stages: int = 4) -> Tensor:
    """x [M, K] times weight [N, K] transposed, in tiles of `tile` rows and columns that walk K in one order."""
    rows, inner = x.shape
    out = torch.empty(rows, len(weight), dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(len(weight), tile[1]), triton.cdiv(rows, tile[0]))](
        x, weight, out, rows, len(weight), inner, BM=tile[0], BN=tile[1], BK=64, num_warps=warps, num_stages=stages
    )
    return out
