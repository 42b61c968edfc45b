"""Decode attention: one new token per row attends to the prompt of its group and to the row's own tokens.

Two kinds of programs, whose results are merged by log-sum-exp:
    prefix    one prompt and one key head for a block of rows: the prompt's keys and values are read once for all of them
    suffix    one row and one key head; the row's own tokens are cut into splits, so that a few rows still fill the GPU
Everything that changes from step to step (lengths, the slot of a row) is read from GPU memory, so that a captured CUDA graph
stays valid. Soft-capped scores, sliding windows and attention sinks are supported.

    D width of a head, P columns of the prompt store, T columns of the slot store, R rows, H heads, K key heads
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scores(query, keys, scale, SOFTCAP: tl.constexpr):
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1) * SOFTCAP
    return scores


@triton.jit
def _fold(query, key_base, value_base, begin, end, known, position, best, total, output, scale,
          D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):
    """Fold the keys `begin` to `end` of one key head into the online softmax of [M] queries at `position`."""
    wide = tl.arange(0, DP)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        visible = (columns < known)[None, :]
        if WINDOW > 0:
            visible = visible & (position[:, None] - columns[None, :] < WINDOW)
        inside = (columns < known)[:, None] & (wide < D)[None, :]
        keys = tl.load(key_base + columns[:, None] * D + wide[None, :], mask=inside, other=0.0)
        scores = tl.where(visible, _scores(query, keys, scale, SOFTCAP), float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(value_base + columns[:, None] * D + wide[None, :], mask=inside, other=0.0)
        output = output * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    return best, total, output


@triton.jit
def _prefix(query, keys, values, block_prompt, block_rows, slots, slot_length, prompt_length, output_out, stats_out, scale,
            R, P, H: tl.constexpr, K: tl.constexpr, REPEAT: tl.constexpr, REPEAT_PAD: tl.constexpr, ROWS: tl.constexpr,
            D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
            SOFTCAP: tl.constexpr):
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prompt = tl.load(block_prompt + block)
    if prompt < 0:
        return
    M: tl.constexpr = ROWS * REPEAT_PAD
    lane = tl.arange(0, M)
    row = tl.load(block_rows + block * ROWS + lane // REPEAT_PAD)
    used = (row >= 0) & (lane % REPEAT_PAD < REPEAT)
    row = tl.maximum(row, 0)
    here = row * H + head * REPEAT + lane % REPEAT_PAD
    wide = tl.arange(0, DP)
    queries = tl.load(query + here[:, None] * D + wide[None, :], mask=used[:, None] & (wide < D)[None, :], other=0.0)
    known = tl.load(prompt_length + prompt)
    position = known + tl.load(slot_length + tl.load(slots + row))
    base = (prompt.to(tl.int64) * K + head) * P * D
    share = tl.cdiv(tl.cdiv(known, SPLITS), BLOCK) * BLOCK
    begin = split * share
    end = tl.minimum(known, begin + share)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    output = tl.zeros([M, DP], tl.float32)
    best, total, output = _fold(queries, keys + base, values + base, begin, end, known, position, best, total, output, scale,
                               D, DP, BLOCK, WINDOW, SOFTCAP)
    out = split * R * H + here
    tl.store(output_out + out[:, None] * D + wide[None, :], output, mask=used[:, None] & (wide < D)[None, :])
    tl.store(stats_out + out * 2, best, mask=used)
    tl.store(stats_out + out * 2 + 1, total, mask=used)


@triton.jit
def _suffix(query, keys, values, slots, slot_length, output_out, stats_out, scale, R, T, FIRST,
            H: tl.constexpr, K: tl.constexpr, REPEAT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
            BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    known = tl.load(slot_length + slot) + 1  # the new token has just been written
    lane = tl.arange(0, M)
    used = lane < REPEAT
    here = row * H + head * REPEAT + lane
    wide = tl.arange(0, DP)
    queries = tl.load(query + here[:, None] * D + wide[None, :], mask=used[:, None] & (wide < D)[None, :], other=0.0)
    base = (slot.to(tl.int64) * K + head) * T * D
    share = tl.cdiv(tl.cdiv(known, SPLITS), BLOCK) * BLOCK
    begin = split * share
    end = tl.minimum(known, begin + share)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    output = tl.zeros([M, DP], tl.float32)
    position = lane * 0 + known - 1
    best, total, output = _fold(queries, keys + base, values + base, begin, end, known, position, best, total, output, scale,
                               D, DP, BLOCK, WINDOW, SOFTCAP)
    out = (FIRST + split) * R * H + here
    tl.store(output_out + out[:, None] * D + wide[None, :], output, mask=used[:, None] & (wide < D)[None, :])
    tl.store(stats_out + out * 2, best, mask=used)
    tl.store(stats_out + out * 2 + 1, total, mask=used)


@triton.jit
def _merge(outputs_in, stats_in, sinks, out, R, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr,
           PARTS_PAD: tl.constexpr, SINKS: tl.constexpr):
    here = tl.program_id(0)
    part = tl.arange(0, PARTS_PAD)
    wide = tl.arange(0, DP)
    place = part * R * H + here
    best = tl.load(stats_in + place * 2, mask=part < PARTS, other=float("-inf"))
    total = tl.load(stats_in + place * 2 + 1, mask=part < PARTS, other=0.0)
    top = tl.max(best, 0)
    if SINKS:
        sink = tl.load(sinks + here % H).to(tl.float32)
        top = tl.maximum(top, sink)
    factor = tl.where(part < PARTS, tl.exp(best - top), 0.0)
    bottom = tl.sum(factor * total, 0)
    if SINKS:
        bottom += tl.exp(sink - top)
    inside = (part < PARTS)[:, None] & (wide < D)[None, :]
    outputs = tl.load(outputs_in + place[:, None] * D + wide[None, :], mask=inside, other=0.0)
    merged = tl.sum(tl.where(factor[:, None] > 0, outputs * factor[:, None], 0.0), 0) / bottom
    tl.store(out + here * D + wide, merged.to(out.dtype.element_ty), mask=wide < D)


@triton.jit
def _store(key, value, keys, values, slots, slot_length, T, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    column = tl.load(slot_length + slot)
    wide = tl.arange(0, DP)
    place = ((slot.to(tl.int64) * K + head) * T + column) * D + wide
    source = (row * K + head) * D + wide
    tl.store(keys + place, tl.load(key + source, mask=wide < D), mask=wide < D)
    tl.store(values + place, tl.load(value + source, mask=wide < D), mask=wide < D)


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, slot_length: Tensor) -> None:
    """Write each row's new key and value [R, K, D] to the next column of its slot in the KV cache [slots, K, T, D]."""
    rows, heads, width = key.shape
    _store[(rows, heads)](
        key, value, keys, values, slots, slot_length, keys.shape[2], K=heads, D=width, DP=triton.next_power_of_2(width)
    )


class Workspace:
    """Buffers for the partial results of one batch size; allocated once, since a CUDA graph keeps their addresses."""

    def __init__(
        self, rows: int, heads: int, width: int, prefix_splits: int, suffix_splits: int, device: torch.device
    ) -> None:
        self.prefix_splits, self.suffix_splits = prefix_splits, suffix_splits
        parts = prefix_splits + suffix_splits
        self.outputs = torch.zeros(parts, rows, heads, width, dtype=torch.float32, device=device)
        self.stats = torch.zeros(parts, rows, heads, 2, dtype=torch.float32, device=device)


def attend_slots(
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
    workspace: Workspace,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    block: int = 64,
) -> Tensor:
    """Attention output [R, H, D] of the new token of each row; `query` [R, H, D] must be contiguous.

    `block_rows` [blocks, rows] lists the rows that attend to prompt `block_prompt` [blocks], padded with -1. Every row is in
    exactly one block.
    """
    rows, heads, width = query.shape
    key_heads, repeat = keys.shape[1], heads // keys.shape[1]
    padded, repeat_pad = triton.next_power_of_2(width), triton.next_power_of_2(repeat)
    rows_per_block = block_rows.shape[1]
    common = {"D": width, "DP": padded, "BLOCK": block, "WINDOW": window, "SOFTCAP": softcap}
    _prefix[(len(block_prompt), key_heads, workspace.prefix_splits)](
        query, prompt_keys, prompt_values, block_prompt, block_rows, slots, slot_length, prompt_length,
        workspace.outputs, workspace.stats, scale, rows, prompt_keys.shape[2],
        H=heads, K=key_heads, REPEAT=repeat, REPEAT_PAD=repeat_pad, ROWS=rows_per_block, SPLITS=workspace.prefix_splits,
        num_warps=4, **common,
    )  # fmt: skip
    _suffix[(rows, key_heads, workspace.suffix_splits)](
        query, keys, values, slots, slot_length, workspace.outputs, workspace.stats, scale, rows, keys.shape[2],
        workspace.prefix_splits, H=heads, K=key_heads, REPEAT=repeat, M=max(16, repeat_pad), SPLITS=workspace.suffix_splits,
        num_warps=4, **common,
    )  # fmt: skip
    out = torch.empty_like(query)
    parts = workspace.prefix_splits + workspace.suffix_splits
    _merge[(rows * heads,)](
        workspace.outputs, workspace.stats, query if sinks is None else sinks, out, rows, H=heads, D=width, DP=padded,
        PARTS=parts, PARTS_PAD=triton.next_power_of_2(parts), SINKS=sinks is not None, num_warps=1,
    )  # fmt: skip
    return out


def rows_per_block(heads: int, key_heads: int) -> int:
    """How many rows of a group share one read of the prompt: as many as fill the 16 rows of a matrix product."""
    return max(1, 16 // triton.next_power_of_2(heads // key_heads))
