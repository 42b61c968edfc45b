"""Attention over a pack with its backward: each response attends to its prompt, which is stored once, and to itself.

A *span* is a prompt or a response, and a *tile* is a few tokens of one span. A query attends to the prompt of its response
and to the earlier tokens of its own span. The backward of a prompt's keys reads the prompt itself and all responses of that
prompt, which are adjacent. Nothing is gathered, and every sum has a fixed order, so gradients are bitwise reproducible.

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
"""Block sizes of queries (BM) and keys (BN), each at most a tile; `WIDE` is for heads wider than 128."""


@triton.jit
def _tile(source, start, end, head, B: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
          DESCRIPTORS: tl.constexpr):
    """Load [B, DP]: one head of rows `start` to `start + B` of [N, HEADS, D].

    Rows from `end` on are zeros. Loaded through a descriptor they hold arbitrary values.
    """
    if DESCRIPTORS:
        block = source.load([start, head * D])
    else:
        rows, wide = start + tl.arange(0, B), tl.arange(0, DP)
        place = (rows.to(tl.int64) * HEADS + head)[:, None] * D + wide[None, :]
        block = tl.load(source + place, mask=(rows < end)[:, None] & (wide < D)[None, :], other=0.0)
    return block


@triton.jit
def _keys_at(number, prompt, count, begin, end, BN: tl.constexpr):
    """(first, end) of the keys of one loop step: the prompt's keys come first, then those of the query's own span."""
    before = tl.cdiv(count, BN)
    start = tl.where(number < before, prompt + number * BN, begin + (number - before) * BN)
    return start, tl.where(number < before, prompt + count, end)


@triton.jit
def _visible(rows, columns, end, places, query_places, WINDOW: tl.constexpr):
    """[rows, columns] bool: which keys each query attends to. Prompts precede all responses, so pack order decides."""
    visible = (columns < end)[None, :] & (columns[None, :] <= rows[:, None])
    if WINDOW > 0:
        key_places = tl.load(places + columns, mask=columns < end, other=0)
        visible = visible & (query_places[:, None] - key_places[None, :] < WINDOW)
    return visible


@triton.jit
def _forward(query, key, value, places, tiles, out, normaliser, scale, N, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
             DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, DESCRIPTORS: tl.constexpr):
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    begin, end = tl.load(tile + 1), tl.load(tile + 2)
    first = tl.load(tile) + tl.program_id(2) * BM
    if first >= end:
        return
    prompt, count = tl.load(tile + 3), tl.load(tile + 4)
    key_head = head // (H // K)
    rows = first + tl.arange(0, BM)
    inside = rows < end
    queries = _tile(query, first, end, head, BM, H, D, DP, DESCRIPTORS)
    query_places = tl.load(places + rows, mask=inside, other=0)
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    output = tl.zeros([BM, DP], tl.float32)
    own_end = tl.minimum(first + BM, end)
    for number in range(tl.cdiv(count, BN) + tl.cdiv(own_end - begin, BN)):
        start, here_end = _keys_at(number, prompt, count, begin, own_end, BN)
        columns = start + tl.arange(0, BN)
        keys = _tile(key, start, here_end, key_head, BN, K, D, DP, DESCRIPTORS)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(_visible(rows, columns, here_end, places, query_places, WINDOW), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = higher
        if WINDOW > 0:
            # Only a window can hide all keys of a query's first block.
            safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = _tile(value, start, here_end, key_head, BN, K, D, DP, DESCRIPTORS)
        output = tl.dot(weights.to(values.dtype), values, output * shrink[:, None], input_precision="ieee")
        best = higher
    wide = tl.arange(0, DP)
    place = (rows.to(tl.int64) * H + head)[:, None] * D + wide[None, :]
    tl.store(out + place, (output / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (wide < D)[None, :])
    tl.store(normaliser + head * N + rows, best + tl.log2(total), mask=inside)


@triton.jit
def _backward_queries(query, key, value, out, to_out, normaliser, places, tiles, to_query, delta_out, scale, plain_scale, N,
                      H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr, WINDOW: tl.constexpr, DESCRIPTORS: tl.constexpr):
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    begin, end = tl.load(tile + 1), tl.load(tile + 2)
    first = tl.load(tile) + tl.program_id(2) * BM
    if first >= end:
        return
    prompt, count = tl.load(tile + 3), tl.load(tile + 4)
    key_head = head // (H // K)
    rows = first + tl.arange(0, BM)
    inside = rows < end
    queries = _tile(query, first, end, head, BM, H, D, DP, DESCRIPTORS)
    gradient = _tile(to_out, first, end, head, BM, H, D, DP, DESCRIPTORS)
    output = _tile(out, first, end, head, BM, H, D, DP, DESCRIPTORS)
    delta = tl.sum(gradient.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(delta_out + head * N + rows, delta, mask=inside)
    query_places = tl.load(places + rows, mask=inside, other=0)
    lse = tl.load(normaliser + head * N + rows, mask=inside, other=0.0)
    to_queries = tl.zeros([BM, DP], tl.float32)
    own_end = tl.minimum(first + BM, end)
    for number in range(tl.cdiv(count, BN) + tl.cdiv(own_end - begin, BN)):
        start, here_end = _keys_at(number, prompt, count, begin, own_end, BN)
        columns = start + tl.arange(0, BN)
        keys = _tile(key, start, here_end, key_head, BN, K, D, DP, DESCRIPTORS)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        visible = _visible(rows, columns, here_end, places, query_places, WINDOW)
        weights = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
        values = _tile(value, start, here_end, key_head, BN, K, D, DP, DESCRIPTORS)
        to_weights = tl.dot(gradient, tl.trans(values), input_precision="ieee")
        to_scores = weights * (to_weights - delta[:, None])
        to_queries = tl.dot(to_scores.to(keys.dtype), keys, to_queries, input_precision="ieee")
    wide = tl.arange(0, DP)
    place = (rows.to(tl.int64) * H + head)[:, None] * D + wide[None, :]
    mask = inside[:, None] & (wide < D)[None, :]
    tl.store(to_query + place, (to_queries * plain_scale).to(to_query.dtype.element_ty), mask=mask)


@triton.jit
def _backward_keys(query, key, value, to_out, normaliser, delta_in, places, tiles, to_key, to_value, scale, plain_scale, N,
                   H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   WINDOW: tl.constexpr, DESCRIPTORS: tl.constexpr):
    tile, key_head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    span_end = tl.load(tile + 2)
    first = tl.load(tile) + tl.program_id(2) * BN
    if first >= span_end:
        return
    later, later_end = tl.load(tile + 3), tl.load(tile + 4)
    columns = first + tl.arange(0, BN)
    known = columns < span_end
    keys = _tile(key, first, span_end, key_head, BN, K, D, DP, DESCRIPTORS)
    values = _tile(value, first, span_end, key_head, BN, K, D, DP, DESCRIPTORS)
    key_places = tl.load(places + columns, mask=known, other=0)
    to_keys = tl.zeros([BN, DP], tl.float32)
    to_values = tl.zeros([BN, DP], tl.float32)
    # One loop over the query heads that share these keys, and for each head over the rows of the own span, then over the
    # rows of the responses. Three separate loops would need more registers than there are.
    own = tl.cdiv(span_end - first, BM)
    steps = own + tl.cdiv(later_end - later, BM)
    for step in range(steps * (H // K)):
        head = key_head * (H // K) + step // steps
        number = step % steps
        start = tl.where(number < own, first + number * BM, later + (number - own) * BM)
        end = tl.where(number < own, span_end, later_end)
        rows = start + tl.arange(0, BM)
        inside = rows < end
        queries = _tile(query, start, end, head, BM, H, D, DP, DESCRIPTORS)
        lse = tl.load(normaliser + head * N + rows, mask=inside, other=0.0)
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
        # Responses follow all prompts in the pack, so pack order decides here too.
        visible = inside[None, :] & (columns[:, None] <= rows[None, :])
        if WINDOW > 0:
            query_places = tl.load(places + rows, mask=inside, other=0)
            visible = visible & (query_places[None, :] - key_places[:, None] < WINDOW)
        weights = tl.where(visible, tl.exp2(scores - lse[None, :]), 0.0)
        gradient = _tile(to_out, start, end, head, BM, H, D, DP, DESCRIPTORS)
        to_values = tl.dot(weights.to(gradient.dtype), gradient, to_values, input_precision="ieee")
        delta = tl.load(delta_in + head * N + rows, mask=inside, other=0.0)
        to_weights = tl.dot(values, tl.trans(gradient), input_precision="ieee")
        to_scores = weights * (to_weights - delta[None, :])
        to_keys = tl.dot(to_scores.to(queries.dtype), queries, to_keys, input_precision="ieee")
    wide = tl.arange(0, DP)
    place = (columns.to(tl.int64) * K + key_head)[:, None] * D + wide[None, :]
    mask = known[:, None] & (wide < D)[None, :]
    tl.store(to_key + place, (to_keys * plain_scale).to(to_key.dtype.element_ty), mask=mask)
    tl.store(to_value + place, to_values.to(to_value.dtype.element_ty), mask=mask)


def attend_forward(
    query: Tensor, key: Tensor, value: Tensor, places: Tensor, tiles: Tensor, scaling: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention output [N, H, D] and its log-sum-exp [H, N] in base 2.

    `query` is [N, H, D], `key` and `value` are [N, K, D], `tiles` are the query tiles of `Spans`.
    """
    tokens, heads, _ = query.shape
    out = torch.empty_like(query)
    normaliser = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    options, common = _launch_options(FORWARD, query), _common(query, key, window)
    load = _loader(options, query)
    _forward[(len(tiles), heads, TILE // options["BM"])](
        load(query, "BM"), load(key, "BN"), load(value, "BN"), places, tiles, out, normaliser, scaling * _LOG2E, tokens,
        **options, **common,
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
    """Gradients of queries, keys and values; `to_out` [N, H, D] is the gradient of the output."""
    tokens, heads, _ = query.shape
    gradients = [torch.empty_like(x) for x in (query, key, value)]
    delta = torch.empty_like(normaliser)
    options, common = _launch_options(BACKWARD, query), _common(query, key, window)
    load = _loader(options, query)
    _backward_queries[(len(query_tiles), heads, TILE // options["BM"])](
        load(query, "BM"), load(key, "BN"), load(value, "BN"), load(out, "BM"), load(to_out, "BM"), normaliser, places,
        query_tiles, gradients[0], delta, scaling * _LOG2E, scaling, tokens, **options, **common,
    )  # fmt: skip
    _backward_keys[(len(key_tiles), key.shape[1], TILE // options["BN"])](
        load(query, "BM"), load(key, "BN"), load(value, "BN"), load(to_out, "BM"), normaliser, delta, places, key_tiles,
        gradients[1], gradients[2], scaling * _LOG2E, scaling, tokens, **options, **common,
    )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def _launch_options(usual: dict[str, int], query: Tensor) -> dict[str, int]:
    return WIDE if query.shape[-1] > 128 else usual


def _uses_descriptors(query: Tensor) -> bool:
    width = query.shape[-1]
    return tensor_memory(query) and width == triton.next_power_of_2(width) and width * query.element_size() >= 32


def _common(query: Tensor, key: Tensor, window: int) -> dict[str, Any]:
    _, heads, width = query.shape
    return {"H": heads, "K": key.shape[1], "D": width, "DP": triton.next_power_of_2(width), "WINDOW": window,
            "DESCRIPTORS": _uses_descriptors(query)}  # fmt: skip


def _loader(options: dict[str, int], query: Tensor) -> Callable[[Tensor, str], Any]:
    """A function that wraps a table [N, heads, D] for a kernel: as a tensor descriptor where the GPU has them."""
    if not _uses_descriptors(query):
        return lambda table, rows: table
    return lambda table, rows: TensorDescriptor.from_tensor(table.flatten(1), [options[rows], table.shape[-1]])
