"""Decode kernels with the arithmetic of training: a token has the bits that it has in a pack.

    rotate_into_slots   queries and keys normed and rotated as in `gradients.py`; keys and values go to the KV cache
    attend_chained      attention that adds up in the order of `attention.py`: the prompt's keys, then the row's own, 64 at a
                        time. The prefix kernel stores its running maximum, total and output in float32, and the suffix
                        kernel goes on from there. Nothing is split over keys and nothing is merged, so a row's bits cannot
                        depend on the batch
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from legato.policy.kernels.gradients import rotated_at, rotation_blocks

LOG2E = 1.4426950408889634
BLOCK = 64
"""Keys in a step, as in training."""
LANES, WARPS = 64, 4
"""Queries in a tile and warps of a program, as in training: they decide in which order a row's sums are made."""


@triton.jit
def _rotate_into_slots(query, key, value, cosine, sine, query_norm, key_norm, query_out, keys, values, slots, slot_length,
                       epsilon, query_stride, key_stride, value_stride, ROWS, T,
                       H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
                       BLOCK: tl.constexpr, NORM: tl.constexpr):
    program, blocks, half = tl.program_id(0), tl.cdiv(ROWS * H, BLOCK), tl.arange(0, HALF)
    if program < blocks:
        pair = program * BLOCK + tl.arange(0, BLOCK)
        inside = (pair < ROWS * H)[:, None] & (half < D // 2)[None, :]
        at = ((pair // H).to(tl.int64) * query_stride + pair % H * D)[:, None] + half[None, :]
        low, high = rotated_at(query, at, cosine, sine, query_norm, epsilon, pair, half, inside, H, D, NORM)
        to = pair.to(tl.int64)[:, None] * D + half[None, :]
        tl.store(query_out + to, low, mask=inside)
        tl.store(query_out + to + D // 2, high, mask=inside)
    else:
        pair = (program - blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = (pair < ROWS * K)[:, None] & (half < D // 2)[None, :]
        at = ((pair // K).to(tl.int64) * key_stride + pair % K * D)[:, None] + half[None, :]
        low, high = rotated_at(key, at, cosine, sine, key_norm, epsilon, pair, half, inside, K, D, NORM)
        slot = tl.load(slots + pair // K, mask=pair < ROWS * K, other=0)
        column = tl.load(slot_length + slot, mask=pair < ROWS * K, other=0)
        to = ((slot * K + pair % K) * T + column)[:, None] * D + half[None, :]
        tl.store(keys + to, low, mask=inside)
        tl.store(keys + to + D // 2, high, mask=inside)
        own = value + ((pair // K).to(tl.int64) * value_stride + pair % K * D)[:, None] + half[None, :]
        tl.store(values + to, tl.load(own, mask=inside), mask=inside)
        tl.store(values + to + D // 2, tl.load(own + D // 2, mask=inside), mask=inside)


def rotate_into_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    slot_length: Tensor,
    width: int,
) -> Tensor:
    """Queries [R, H, D] with the bits of `gradients.rotate_forward`; keys and values are stored. Else as `layers.heads`."""
    rows, count, key_heads = len(query), query.shape[1] // width, key.shape[1] // width
    out = torch.empty(rows, count, width, dtype=query.dtype, device=query.device)
    query_norm, key_norm, epsilon = (cosine, cosine, 0.0) if norms is None else norms
    half, block = rotation_blocks(width)
    _rotate_into_slots[(triton.cdiv(rows * count, block) + triton.cdiv(rows * key_heads, block),)](
        query, key, value, cosine, sine, query_norm, key_norm, out, keys, values, slots, slot_length, epsilon,
        query.stride(0), key.stride(0), value.stride(0), rows, keys.shape[2], H=count, K=key_heads, D=width, HALF=half,
        BLOCK=block, NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return out


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
    best, total, output = _walk(queries, keys + base, values + base, tl.load(slot_length + slot) + 1, best, total, output,
                                scale, first, D, SLICE, BLOCK)
    tl.store(out + here[:, None] * D + part[None, :], (output / total[:, None]).to(out.dtype.element_ty), mask=used[:, None])


def attend_chained(
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
    lanes: int = LANES,
    warps: int = WARPS,
    slices: int = 1,
) -> Tensor:
    """Attention [R, H, D] of the new token of each row, as `decode.attend_slots`, added up as in training.

    D must be a power of two. `slices` cuts output columns, and each slice computes the scores again.
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


def rows_per_tile(heads: int, key_heads: int, lanes: int = LANES) -> int:
    """How many rows of a group share one read of the prompt."""
    return max(1, lanes // triton.next_power_of_2(heads // key_heads))
