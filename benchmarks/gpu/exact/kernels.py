"""Kernels under trial: decode attention that adds up in the order of training, and a product in tiles of any size.

`chain` reads the prompt's keys and then the row's own, 64 at a time, with the arithmetic of `kernels/attention.py`. The
prefix kernel stores its running maximum, total and output in float32, and the suffix kernel goes on from there. Nothing is
split over keys and nothing is merged, so a row's bits cannot depend on the batch. To fill the GPU with few rows, output
columns are cut into slices; each slice computes the scores again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
BLOCK = 64
"""Keys in a step, as in training."""


@triton.jit
def _step(queries, keys, values, visible, best, total, output, scale):
    """One block of keys in the online softmax of training, without a window."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weights, 1)
    output = tl.dot(weights.to(values.dtype), values, output * shrink[:, None], input_precision="ieee")
    return higher, total, output


@triton.jit
def _walk(queries, keys, values, known, best, total, output, scale, first, D: tl.constexpr, SLICE: tl.constexpr,
          BLOCK: tl.constexpr):
    """Fold keys 0 to `known` of one key head, [T, D] at `keys`, into the softmax; values are columns `first` and on."""
    wide, part = tl.arange(0, D), first + tl.arange(0, SLICE)
    for start in range(0, known, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (columns < known)[:, None]
        block = tl.load(keys + columns[:, None] * D + wide[None, :], mask=inside, other=0.0)
        held = tl.load(values + columns[:, None] * D + part[None, :], mask=inside, other=0.0)
        best, total, output = _step(queries, block, held, (columns < known)[None, :], best, total, output, scale)
    return best, total, output


@triton.jit
def _prefix(query, keys, values, block_prompt, block_rows, prompt_length, states, stats, scale, P, H: tl.constexpr,
            K: tl.constexpr, REPEAT: tl.constexpr, REPEAT_PAD: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr,
            D: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr):
    block, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * SLICE
    prompt = tl.load(block_prompt + block)
    if prompt < 0:
        return
    lane = tl.arange(0, M)
    member = lane // REPEAT_PAD
    row = tl.load(block_rows + block * ROWS + member, mask=member < ROWS, other=-1)
    used = (row >= 0) & (lane % REPEAT_PAD < REPEAT)
    here = tl.maximum(row, 0) * H + head * REPEAT + lane % REPEAT_PAD
    wide, part = tl.arange(0, D), first + tl.arange(0, SLICE)
    queries = tl.load(query + here[:, None] * D + wide[None, :], mask=used[:, None], other=0.0)
    base = (prompt.to(tl.int64) * K + head) * P * D
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    output = tl.zeros([M, SLICE], tl.float32)
    best, total, output = _walk(queries, keys + base, values + base, tl.load(prompt_length + prompt), best, total, output,
                                scale, first, D, SLICE, BLOCK)
    tl.store(states + here[:, None] * D + part[None, :], output, mask=used[:, None])
    if first == 0:
        tl.store(stats + here * 2, best, mask=used)
        tl.store(stats + here * 2 + 1, total, mask=used)


@triton.jit
def _suffix(query, keys, values, slots, slot_length, states, stats, out, scale, T, H: tl.constexpr, K: tl.constexpr,
            REPEAT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr):
    row, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * SLICE
    slot = tl.load(slots + row)
    lane = tl.arange(0, M)
    used = lane < REPEAT
    here = row * H + head * REPEAT + tl.minimum(lane, REPEAT - 1)
    wide, part = tl.arange(0, D), first + tl.arange(0, SLICE)
    queries = tl.load(query + here[:, None] * D + wide[None, :], mask=used[:, None], other=0.0)
    best = tl.load(stats + here * 2)
    total = tl.load(stats + here * 2 + 1)
    output = tl.load(states + here[:, None] * D + part[None, :])
    base = (slot.to(tl.int64) * K + head) * T * D
    best, total, output = _walk(queries, keys + base, values + base, tl.load(slot_length + slot), best, total, output,
                                scale, first, D, SLICE, BLOCK)
    tl.store(out + here[:, None] * D + part[None, :], (output / total[:, None]).to(out.dtype.element_ty), mask=used[:, None])


def chain(
    query: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    slots: Tensor,
    slot_length: Tensor,
    prompt_length: Tensor,
    block_prompt: Tensor,
    block_rows: Tensor,
    scale: float,
    lanes: int,
    warps: int,
    slices: int = 1,
) -> Tensor:
    """Attention [R, H, D] of one token per row, added up as in training.

    As `attend_slots`, but `slot_length` counts the new token. `lanes` is the number of queries in a tile and `warps` the
    number of warps of a program: they decide in which order a row's sums are made. D must be a power of two.
    """
    rows, heads, width = query.shape
    key_heads, repeat = keys.shape[1], heads // keys.shape[1]
    padded = triton.next_power_of_2(repeat)
    states = torch.empty(rows, heads, width, dtype=torch.float32, device=query.device)
    stats = torch.empty(rows, heads, 2, dtype=torch.float32, device=query.device)
    out = torch.empty_like(query)
    common: dict[str, Any] = {
        "H": heads, "K": key_heads, "REPEAT": repeat, "M": lanes, "D": width, "SLICE": width // slices, "BLOCK": BLOCK,
        "num_warps": warps,
    }  # fmt: skip
    _prefix[(len(block_prompt), key_heads, slices)](
        query, prompt_keys, prompt_values, block_prompt, block_rows, prompt_length, states, stats, scale * LOG2E,
        prompt_keys.shape[2], REPEAT_PAD=padded, ROWS=block_rows.shape[1], **common,
    )  # fmt: skip
    _suffix[(rows, key_heads, slices)](
        query, keys, values, slots, slot_length, states, stats, out, scale * LOG2E, keys.shape[2], **common
    )
    return out


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
