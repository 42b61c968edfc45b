"""Attention of a pack for training: every response sees its prompt, which is stored once, and itself. With its gradient.

A *tile* is a few tokens of one span (a prompt or a response). Queries look at the prompt of their response and at their own
span up to themselves; keys of a prompt are looked at from their own span and from all responses of the prompt, which lie
together. Nothing is gathered, and every sum has one order: the gradient repeats to the bit.

    out = sum_k p_k v_k      p = 2^(s - lse)      ds = p (dp - delta)      delta = sum(out dout)
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from legato.policy.kernels.head import tensor_memory
from legato.policy.layout.spans import TILE

_LOG2E = 1.4426950408889634
FORWARD = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}
BACKWARD = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}
WIDE = {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 2}
"""Queries and keys a program takes at once, at most a tile; `WIDE` for heads of more than 128, of which fewer fit."""


@triton.jit
def _tile(source, start, end, head, B: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
          DESCRIBED: tl.constexpr):
    """[B, DP] of one head of [N, HEADS, D] from a row on. Rows from `end` on are zeros, or by a descriptor anything."""
    if DESCRIBED:
        found = source.load([start, head * D])
    else:
        rows, wide = start + tl.arange(0, B), tl.arange(0, DP)
        place = (rows.to(tl.int64) * HEADS + head)[:, None] * D + wide[None, :]
        found = tl.load(source + place, mask=(rows < end)[:, None] & (wide < D)[None, :], other=0.0)
    return found


@triton.jit
def _keys_at(number, prompt, count, begin, end, BN: tl.constexpr):
    """(from, to) of the keys of a step: first those of the prompt, then those of the own span."""
    before = tl.cdiv(count, BN)
    start = tl.where(number < before, prompt + number * BN, begin + (number - before) * BN)
    return start, tl.where(number < before, prompt + count, end)


@triton.jit
def _seen(rows, columns, end, places, at, WINDOW: tl.constexpr):
    """[rows, columns]: which keys a query sees. Prompts lie before all responses, so the order in the pack says it."""
    seen = (columns < end)[None, :] & (columns[None, :] <= rows[:, None])
    if WINDOW > 0:
        there = tl.load(places + columns, mask=columns < end, other=0)
        seen = seen & (at[:, None] - there[None, :] < WINDOW)
    return seen


@triton.jit
def _forward(query, key, value, places, tiles, out, normaliser, scale, N, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
             DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, DESCRIBED: tl.constexpr):
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    begin, end = tl.load(tile + 1), tl.load(tile + 2)
    first = tl.load(tile) + tl.program_id(2) * BM
    if first >= end:
        return
    prompt, count = tl.load(tile + 3), tl.load(tile + 4)
    key_head = head // (H // K)
    rows = first + tl.arange(0, BM)
    inside = rows < end
    asked = _tile(query, first, end, head, BM, H, D, DP, DESCRIBED)
    at = tl.load(places + rows, mask=inside, other=0)
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    found = tl.zeros([BM, DP], tl.float32)
    own_end = tl.minimum(first + BM, end)
    for number in range(tl.cdiv(count, BN) + tl.cdiv(own_end - begin, BN)):
        start, here_end = _keys_at(number, prompt, count, begin, own_end, BN)
        columns = start + tl.arange(0, BN)
        keys = _tile(key, start, here_end, key_head, BN, K, D, DP, DESCRIBED)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(_seen(rows, columns, here_end, places, at, WINDOW), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = higher
        if WINDOW > 0:
            # Only then may the first keys be out of sight for a query.
            safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = _tile(value, start, here_end, key_head, BN, K, D, DP, DESCRIBED)
        found = tl.dot(weights.to(values.dtype), values, found * shrink[:, None], input_precision="ieee")
        best = higher
    wide = tl.arange(0, DP)
    place = (rows.to(tl.int64) * H + head)[:, None] * D + wide[None, :]
    tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (wide < D)[None, :])
    tl.store(normaliser + head * N + rows, best + tl.log2(total), mask=inside)


@triton.jit
def _backward_queries(query, key, value, out, to_out, normaliser, places, tiles, to_query, delta_out, scale, plain_scale, N,
                      H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr, WINDOW: tl.constexpr, DESCRIBED: tl.constexpr):
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    begin, end = tl.load(tile + 1), tl.load(tile + 2)
    first = tl.load(tile) + tl.program_id(2) * BM
    if first >= end:
        return
    prompt, count = tl.load(tile + 3), tl.load(tile + 4)
    key_head = head // (H // K)
    rows = first + tl.arange(0, BM)
    inside = rows < end
    asked = _tile(query, first, end, head, BM, H, D, DP, DESCRIBED)
    pull = _tile(to_out, first, end, head, BM, H, D, DP, DESCRIBED)
    said = _tile(out, first, end, head, BM, H, D, DP, DESCRIBED)
    delta = tl.sum(pull.to(tl.float32) * said.to(tl.float32), 1)
    tl.store(delta_out + head * N + rows, delta, mask=inside)
    at = tl.load(places + rows, mask=inside, other=0)
    lse = tl.load(normaliser + head * N + rows, mask=inside, other=0.0)
    found = tl.zeros([BM, DP], tl.float32)
    own_end = tl.minimum(first + BM, end)
    for number in range(tl.cdiv(count, BN) + tl.cdiv(own_end - begin, BN)):
        start, here_end = _keys_at(number, prompt, count, begin, own_end, BN)
        columns = start + tl.arange(0, BN)
        keys = _tile(key, start, here_end, key_head, BN, K, D, DP, DESCRIBED)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        seen = _seen(rows, columns, here_end, places, at, WINDOW)
        weights = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        values = _tile(value, start, here_end, key_head, BN, K, D, DP, DESCRIBED)
        at_weights = tl.dot(pull, tl.trans(values), input_precision="ieee")
        at_scores = weights * (at_weights - delta[:, None])
        found = tl.dot(at_scores.to(keys.dtype), keys, found, input_precision="ieee")
    wide = tl.arange(0, DP)
    place = (rows.to(tl.int64) * H + head)[:, None] * D + wide[None, :]
    kept = inside[:, None] & (wide < D)[None, :]
    tl.store(to_query + place, (found * plain_scale).to(to_query.dtype.element_ty), mask=kept)


@triton.jit
def _backward_keys(query, key, value, to_out, normaliser, delta_in, places, tiles, to_key, to_value, scale, plain_scale, N,
                   H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   WINDOW: tl.constexpr, DESCRIBED: tl.constexpr):
    tile, key_head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    span_end = tl.load(tile + 2)
    first = tl.load(tile) + tl.program_id(2) * BN
    if first >= span_end:
        return
    later, later_end = tl.load(tile + 3), tl.load(tile + 4)
    columns = first + tl.arange(0, BN)
    known = columns < span_end
    keys = _tile(key, first, span_end, key_head, BN, K, D, DP, DESCRIBED)
    values = _tile(value, first, span_end, key_head, BN, K, D, DP, DESCRIBED)
    there = tl.load(places + columns, mask=known, other=0)
    to_keys = tl.zeros([BN, DP], tl.float32)
    to_values = tl.zeros([BN, DP], tl.float32)
    # One loop over the heads that share the keys, and for each over the rows of the own span, then those of the responses:
    # three loops in a row would need more registers than there are.
    own = tl.cdiv(span_end - first, BM)
    steps = own + tl.cdiv(later_end - later, BM)
    for step in range(steps * (H // K)):
        head = key_head * (H // K) + step // steps
        number = step % steps
        start = tl.where(number < own, first + number * BM, later + (number - own) * BM)
        end = tl.where(number < own, span_end, later_end)
        rows = start + tl.arange(0, BM)
        inside = rows < end
        asked = _tile(query, start, end, head, BM, H, D, DP, DESCRIBED)
        lse = tl.load(normaliser + head * N + rows, mask=inside, other=0.0)
        scores = tl.dot(keys, tl.trans(asked), input_precision="ieee") * scale
        # Responses lie behind all prompts, so the order in the pack says who is seen there too.
        seen = inside[None, :] & (columns[:, None] <= rows[None, :])
        if WINDOW > 0:
            at = tl.load(places + rows, mask=inside, other=0)
            seen = seen & (at[None, :] - there[:, None] < WINDOW)
        weights = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
        pull = _tile(to_out, start, end, head, BM, H, D, DP, DESCRIBED)
        to_values = tl.dot(weights.to(pull.dtype), pull, to_values, input_precision="ieee")
        delta = tl.load(delta_in + head * N + rows, mask=inside, other=0.0)
        at_weights = tl.dot(values, tl.trans(pull), input_precision="ieee")
        at_scores = weights * (at_weights - delta[None, :])
        to_keys = tl.dot(at_scores.to(asked.dtype), asked, to_keys, input_precision="ieee")
    wide = tl.arange(0, DP)
    place = (columns.to(tl.int64) * K + key_head)[:, None] * D + wide[None, :]
    kept = known[:, None] & (wide < D)[None, :]
    tl.store(to_key + place, (to_keys * plain_scale).to(to_key.dtype.element_ty), mask=kept)
    tl.store(to_value + place, to_values.to(to_value.dtype.element_ty), mask=kept)


def attend_forward(
    query: Tensor, key: Tensor, value: Tensor, places: Tensor, tiles: Tensor, scaling: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """([N, H, D], normaliser [H, N] of base 2) for queries [N, H, D] and keys and values [N, K, D]; `tiles` of queries."""
    tokens, heads, _ = query.shape
    out = torch.empty_like(query)
    normaliser = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    how, common = _how(FORWARD, query), _common(query, key, window)
    seen = _seen_by(how, query)
    _forward[(len(tiles), heads, TILE // how["BM"])](
        seen(query, "BM"), seen(key, "BN"), seen(value, "BN"), places, tiles, out, normaliser, scaling * _LOG2E, tokens,
        **how, **common,
    )  # fmt: skip
    return out, normaliser


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    to_out: Tensor,
    normaliser: Tensor,
    places: Tensor,
    query_tiles: Tensor,
    key_tiles: Tensor,
    scaling: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at queries, keys and values."""
    tokens, heads, _ = query.shape
    found = [torch.empty_like(x) for x in (query, key, value)]
    delta = torch.empty_like(normaliser)
    how, common = _how(BACKWARD, query), _common(query, key, window)
    seen = _seen_by(how, query)
    _backward_queries[(len(query_tiles), heads, TILE // how["BM"])](
        seen(query, "BM"), seen(key, "BN"), seen(value, "BN"), seen(out, "BM"), seen(to_out, "BM"), normaliser, places,
        query_tiles, found[0], delta, scaling * _LOG2E, scaling, tokens, **how, **common,
    )  # fmt: skip
    _backward_keys[(len(key_tiles), key.shape[1], TILE // how["BN"])](
        seen(query, "BM"), seen(key, "BN"), seen(value, "BN"), seen(to_out, "BM"), normaliser, delta, places, key_tiles,
        found[1], found[2], scaling * _LOG2E, scaling, tokens, **how, **common,
    )  # fmt: skip
    return found[0], found[1], found[2]


def _how(usual: dict[str, int], query: Tensor) -> dict[str, int]:
    return WIDE if query.shape[-1] > 128 else usual


def _described(query: Tensor) -> bool:
    width = query.shape[-1]
    return tensor_memory(query) and width == triton.next_power_of_2(width) and width * query.element_size() >= 32


def _common(query: Tensor, key: Tensor, window: int) -> dict[str, Any]:
    _, heads, width = query.shape
    return {"H": heads, "K": key.shape[1], "D": width, "DP": triton.next_power_of_2(width), "WINDOW": window,
            "DESCRIBED": _described(query)}  # fmt: skip


def _seen_by(how: dict[str, int], query: Tensor) -> Callable[[Tensor, str], Any]:
    """How a kernel reads the tiles of [N, heads, D]: by a descriptor where the device has them."""
    if not _described(query):
        return lambda table, rows: table
    return lambda table, rows: TensorDescriptor.from_tensor(table.flatten(1), [how[rows], table.shape[-1]])
