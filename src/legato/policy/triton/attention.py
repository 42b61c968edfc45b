"""Attention of a pack for training: every response sees its prompt, which is stored once, and itself. With its gradient.

A *tile* is a few tokens of one span (a prompt or a response). Queries look at the prompt of their response and at their own
span up to themselves; keys of a prompt are looked at from their own span and from all responses of the prompt, which lie
together. Nothing is gathered, and every sum has one order: the gradient repeats to the bit.

    out = sum_k p_k v_k      p = 2^(s - lse)      ds = p (dp - delta)      delta = sum(out dout)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from legato.policy.spans import KEY_TILE, QUERY_TILE

_LOG2E = 1.4426950408889634


@triton.jit
def _tile(source, rows, known, head, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """[rows, DP] of one head of [N, HEADS, D]."""
    wide = tl.arange(0, DP)
    place = (rows.to(tl.int64) * HEADS + head)[:, None] * D + wide[None, :]
    return tl.load(source + place, mask=known[:, None] & (wide < D)[None, :], other=0.0)


@triton.jit
def _seen(rows, columns, known, places, own: tl.constexpr, WINDOW: tl.constexpr, at):
    """[rows, columns] bool: what a query may look at; `own`: in its own span, up to itself."""
    seen = known[None, :] & (rows[:, None] >= 0)
    if own:
        seen = seen & (columns[None, :] <= rows[:, None])
    if WINDOW > 0:
        there = tl.load(places + columns, mask=known, other=0)
        seen = seen & (at[:, None] - there[None, :] < WINDOW)
    return seen


@triton.jit
def _fold(query, key, value, places, rows, at, begin, end, key_head, best, total, found, scale, own: tl.constexpr,
          K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    for start in range(begin, end, BN):
        columns = start + tl.arange(0, BN)
        known = columns < end
        keys = _tile(key, columns, known, key_head, K, D, DP)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(_seen(rows, columns, known, places, own, WINDOW, at), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = _tile(value, columns, known, key_head, K, D, DP)
        found = found * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    return best, total, found


@triton.jit
def _forward(query, key, value, places, tiles, out, normaliser, scale, N, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
             DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    first, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    prompt, count = tl.load(tile + 3), tl.load(tile + 4)
    key_head = head // (H // K)
    rows = first + tl.arange(0, BM)
    inside = rows < end
    asked = _tile(query, rows, inside, head, H, D, DP)
    at = tl.load(places + rows, mask=inside, other=0)
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    found = tl.zeros([BM, DP], tl.float32)
    best, total, found = _fold(asked, key, value, places, rows, at, prompt, prompt + count, key_head, best, total, found,
                               scale, False, K, D, DP, BN, WINDOW)
    best, total, found = _fold(asked, key, value, places, rows, at, begin, tl.minimum(first + BM, end), key_head, best,
                               total, found, scale, True, K, D, DP, BN, WINDOW)
    wide = tl.arange(0, DP)
    place = (rows.to(tl.int64) * H + head)[:, None] * D + wide[None, :]
    tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (wide < D)[None, :])
    tl.store(normaliser + head * N + rows, best + tl.log2(total), mask=inside)


@triton.jit
def _query_fold(asked, pull, delta, lse, key, value, places, rows, at, begin, end, key_head, found, scale, own: tl.constexpr,
                K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    for start in range(begin, end, BN):
        columns = start + tl.arange(0, BN)
        known = columns < end
        keys = _tile(key, columns, known, key_head, K, D, DP)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        seen = _seen(rows, columns, known, places, own, WINDOW, at)
        weights = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        values = _tile(value, columns, known, key_head, K, D, DP)
        at_weights = tl.dot(pull, tl.trans(values), input_precision="ieee")
        at_scores = weights * (at_weights - delta[:, None])
        found += tl.dot(at_scores.to(keys.dtype), keys, input_precision="ieee")
    return found


@triton.jit
def _backward_queries(query, key, value, out, to_out, normaliser, places, tiles, to_query, delta_out, scale, plain_scale, N,
                      H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr, WINDOW: tl.constexpr):
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    first, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    prompt, count = tl.load(tile + 3), tl.load(tile + 4)
    key_head = head // (H // K)
    rows = first + tl.arange(0, BM)
    inside = rows < end
    asked = _tile(query, rows, inside, head, H, D, DP)
    pull = _tile(to_out, rows, inside, head, H, D, DP)
    said = _tile(out, rows, inside, head, H, D, DP)
    delta = tl.sum(pull.to(tl.float32) * said.to(tl.float32), 1)
    tl.store(delta_out + head * N + rows, delta, mask=inside)
    at = tl.load(places + rows, mask=inside, other=0)
    lse = tl.load(normaliser + head * N + rows, mask=inside, other=0.0)
    found = tl.zeros([BM, DP], tl.float32)
    found = _query_fold(asked, pull, delta, lse, key, value, places, rows, at, prompt, prompt + count, key_head, found,
                        scale, False, K, D, DP, BN, WINDOW)
    found = _query_fold(asked, pull, delta, lse, key, value, places, rows, at, begin, tl.minimum(first + BM, end), key_head,
                        found, scale, True, K, D, DP, BN, WINDOW)
    wide = tl.arange(0, DP)
    place = (rows.to(tl.int64) * H + head)[:, None] * D + wide[None, :]
    kept = inside[:, None] & (wide < D)[None, :]
    tl.store(to_query + place, (found * plain_scale).to(to_query.dtype.element_ty), mask=kept)


@triton.jit
def _key_fold(query, to_out, normaliser, delta_in, places, keys, values, columns, known, there, begin, end, head, to_keys,
              to_values, scale, N, own: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
              WINDOW: tl.constexpr):
    for start in range(begin, end, BM):
        rows = start + tl.arange(0, BM)
        inside = rows < end
        asked = _tile(query, rows, inside, head, H, D, DP)
        lse = tl.load(normaliser + head * N + rows, mask=inside, other=0.0)
        scores = tl.dot(keys, tl.trans(asked), input_precision="ieee") * scale
        seen = known[:, None] & inside[None, :]
        if own:
            seen = seen & (columns[:, None] <= rows[None, :])
        if WINDOW > 0:
            at = tl.load(places + rows, mask=inside, other=0)
            seen = seen & (at[None, :] - there[:, None] < WINDOW)
        weights = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
        pull = _tile(to_out, rows, inside, head, H, D, DP)
        to_values += tl.dot(weights.to(pull.dtype), pull, input_precision="ieee")
        delta = tl.load(delta_in + head * N + rows, mask=inside, other=0.0)
        at_weights = tl.dot(values, tl.trans(pull), input_precision="ieee")
        at_scores = weights * (at_weights - delta[None, :])
        to_keys += tl.dot(at_scores.to(asked.dtype), asked, input_precision="ieee")
    return to_keys, to_values


@triton.jit
def _backward_keys(query, key, value, to_out, normaliser, delta, places, tiles, to_key, to_value, scale, plain_scale, N,
                   H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   WINDOW: tl.constexpr):
    tile, key_head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    first, end = tl.load(tile), tl.load(tile + 2)
    later, later_end = tl.load(tile + 3), tl.load(tile + 4)
    columns = first + tl.arange(0, BN)
    known = columns < end
    keys = _tile(key, columns, known, key_head, K, D, DP)
    values = _tile(value, columns, known, key_head, K, D, DP)
    there = tl.load(places + columns, mask=known, other=0)
    to_keys = tl.zeros([BN, DP], tl.float32)
    to_values = tl.zeros([BN, DP], tl.float32)
    REPEAT: tl.constexpr = H // K
    for copy in range(REPEAT):
        head = key_head * REPEAT + copy
        to_keys, to_values = _key_fold(query, to_out, normaliser, delta, places, keys, values, columns, known, there, first,
                                       end, head, to_keys, to_values, scale, N, True, H, D, DP, BM, WINDOW)
        to_keys, to_values = _key_fold(query, to_out, normaliser, delta, places, keys, values, columns, known, there, later,
                                       later_end, head, to_keys, to_values, scale, N, False, H, D, DP, BM, WINDOW)
    wide = tl.arange(0, DP)
    place = (columns.to(tl.int64) * K + key_head)[:, None] * D + wide[None, :]
    kept = known[:, None] & (wide < D)[None, :]
    tl.store(to_key + place, (to_keys * plain_scale).to(to_key.dtype.element_ty), mask=kept)
    tl.store(to_value + place, to_values.to(to_value.dtype.element_ty), mask=kept)


def attend_forward(
    query: Tensor, key: Tensor, value: Tensor, places: Tensor, tiles: Tensor, scaling: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """([N, H, D], normaliser [H, N] of base 2) for queries [N, H, D] and keys and values [N, K, D]; `tiles` of queries."""
    tokens, heads, width = query.shape
    out = torch.empty_like(query)
    normaliser = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    _forward[(len(tiles), heads)](
        query, key, value, places, tiles, out, normaliser, scaling * _LOG2E, tokens, H=heads, K=key.shape[1], D=width,
        DP=triton.next_power_of_2(width), BM=QUERY_TILE, BN=64, WINDOW=window, num_warps=8 if width > 64 else 4,
        num_stages=3 if width <= 128 else 2,
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
    tokens, heads, width = query.shape
    found = [torch.empty_like(x) for x in (query, key, value)]
    delta = torch.empty_like(normaliser)
    common = {"H": heads, "K": key.shape[1], "D": width, "DP": triton.next_power_of_2(width), "WINDOW": window}
    _backward_queries[(len(query_tiles), heads)](
        query, key, value, out, to_out, normaliser, places, query_tiles, found[0], delta, scaling * _LOG2E, scaling, tokens,
        BM=QUERY_TILE, BN=32 if width > 64 else 64, num_warps=8 if width > 64 else 4, num_stages=2, **common,
    )  # fmt: skip
    _backward_keys[(len(key_tiles), key.shape[1])](
        query, key, value, to_out, normaliser, delta, places, key_tiles, found[1], found[2], scaling * _LOG2E, scaling,
        tokens, BM=64, BN=KEY_TILE, num_warps=8 if width > 64 else 4, num_stages=2, **common,
    )  # fmt: skip
    return found[0], found[1], found[2]
