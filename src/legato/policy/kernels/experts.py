"""The experts of a mixture for a few tokens per expert, as in decoding: every weight of an active expert is read once.

    route      gates and numbers of the K active experts of a row, from the router's logits
    order      which (row, place) pairs belong to each expert
    gate_up    activation(x Wg^T) * (x Wu^T) of every pair, in blocks of pairs with the same expert
    down       the product of that with Wd
    combine    the sum over the K experts of a row, each times its gate

Grids depend on shapes only and nothing is read by the host, so that a captured CUDA graph stays valid. Sums have a fixed
order. Values are rounded where transformers' experts round them.

    N rows, K active experts of E, H width of the body, F width of an expert; pair n * K + k is the k-th expert of row n
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The sizes of a program of the two products."""

    pairs: int
    """Pairs of one expert in a block."""
    outputs: int
    """Outputs: those of gate and up together in the first product."""
    step: int
    """Inputs read at a time."""
    warps: int
    stages: int

    @classmethod
    def choose(cls, pairs: int, experts: int, dtype: torch.dtype, device: torch.device) -> "Tiles":
        """The sizes for so many pairs and experts on this device."""
        if device.type != "cuda":
            return cls(pairs=16, outputs=32, step=32, warps=4, stages=1)  # the interpreter
        tiles = cls.for_hopper(pairs, experts)
        if dtype == torch.float32:
            return cls(pairs=min(tiles.pairs, 32), outputs=64, step=32, warps=4, stages=2)
        # Hopper and data-centre Blackwell have 227 KiB of shared memory for a program, others as little as 99.
        roomy = torch.cuda.get_device_capability(device)[0] in (9, 10)
        return tiles if roomy else replace(tiles, stages=3)

    @classmethod
    def for_hopper(cls, pairs: int, experts: int) -> "Tiles":
        """Blocks that hold the pairs of most experts, so that few weights are read twice; for 16-bit weights."""
        block = min(128, max(16, triton.next_power_of_2(-(-3 * pairs // (2 * experts)))))
        return cls(pairs=block, outputs=128, step=64, warps=8 if block > 64 else 4, stages=4)


@triton.jit
def _route(logits, gates, experts, E, KIND: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    every, place = tl.arange(0, EP), tl.arange(0, KP)
    scores = tl.load(logits + row * E + every, mask=every < E, other=float("-inf")).to(tl.float32)
    left = scores
    chosen_scores = tl.full([KP], float("-inf"), tl.float32)
    chosen = tl.zeros([KP], tl.int32)
    for k in tl.static_range(K):
        best = tl.max(left, 0)
        # Of equal scores the first, as torch.topk; the last expert where all are NaN.
        number = tl.minimum(tl.min(tl.where(left == best, every, EP), 0), E - 1)
        chosen_scores = tl.where(place == k, best, chosen_scores)
        chosen = tl.where(place == k, number, chosen)
        left = tl.where(every == number, float("-inf"), left)
    shares = tl.exp(chosen_scores - tl.max(scores, 0))
    if KIND == 0:  # a softmax over all experts
        shares = shares / tl.sum(tl.exp(scores - tl.max(scores, 0)), 0)
    elif KIND == 1:  # divided by its sum over the chosen ones
        shares = shares / tl.sum(tl.exp(scores - tl.max(scores, 0)), 0)
        shares = shares / tl.sum(shares, 0)
    else:  # over the chosen ones alone
        shares = shares / tl.sum(shares, 0)
    tl.store(gates + row * K + place, shares.to(gates.dtype.element_ty), mask=place < K)
    tl.store(experts + row * K + place, chosen.to(tl.int64), mask=place < K)


KINDS = {"all": 0, "all, divided": 1, "chosen": 2}
"""How a family makes gates: softmax over all experts, the same divided by its sum over the chosen, or over the chosen."""


def route(logits: Tensor, active: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gates [N, K] in `dtype` and numbers [N, K] of the experts with the highest logits [N, E], the highest first."""
    rows, count = logits.shape
    gates = torch.empty(rows, active, dtype=dtype, device=logits.device)
    experts = torch.empty(rows, active, dtype=torch.int64, device=logits.device)
    _route[(rows,)](
        logits, gates, experts, count, KIND=KINDS[kind], K=active, KP=triton.next_power_of_2(active),
        EP=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return gates, experts


@triton.jit
def _order(experts, order, counts, pairs, capacity, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    count = expert * 0
    for start in range(0, pairs, CHUNK):
        place = start + lane
        mine = tl.load(experts + place, mask=place < pairs, other=-1) == expert
        here = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        # A row whose logits are NaN may name an expert twice; what does not fit is left out.
        tl.store(order + expert * capacity + here, place, mask=mine & (here < capacity))
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, tl.minimum(count, capacity))


@triton.jit
def _find_block(counts, E, EP: tl.constexpr, BM: tl.constexpr):
    """The expert of this program's block of pairs, and which of the expert's blocks it is; an expert >= E: nothing to do."""
    number = tl.program_id(0)
    every = tl.arange(0, EP)
    blocks = tl.cdiv(tl.load(counts + every, mask=every < E, other=0), BM)
    before = tl.cumsum(blocks, 0) <= number
    return tl.sum(before.to(tl.int32), 0), number - tl.sum(tl.where(before, blocks, 0), 0)


@triton.jit
def _product(rows, weight, weight_rows, real, row_starts, width, stride_n, stride_k, BM: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    """[BN, BM]: weight rows times the rows [BM] of a table. Weights are the left operand: their tile is always full.

    FULL: all weight rows are real; EVEN: BK divides the width. Masks are left out then, and so is what they cost.
    """
    step = tl.arange(0, BK)
    weight_at = weight + weight_rows[:, None] * stride_n + step[None, :] * stride_k
    rows_at = rows + row_starts[:, None] + step[None, :]
    total = tl.zeros([BN, BM], tl.float32)
    for start in range(0, width, BK):
        inside = step < width - start
        if EVEN and FULL:
            left = tl.load(weight_at)
        elif EVEN:
            left = tl.load(weight_at, mask=real[:, None], other=0.0)
        elif FULL:
            left = tl.load(weight_at, mask=inside[None, :], other=0.0)
        else:
            left = tl.load(weight_at, mask=real[:, None] & inside[None, :], other=0.0)
        right = tl.load(rows_at) if EVEN else tl.load(rows_at, mask=inside[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        weight_at += BK * stride_k
        rows_at += BK
    return total


@triton.jit
def _gate_up(x, weight, bias, order, counts, out, capacity, active, H, F, E, alpha, limit, stride_e, stride_n, stride_k,
             EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INTERLEAVED: tl.constexpr,
             BIAS: tl.constexpr, CLAMP: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    expert, block = _find_block(counts, E, EP, BM)
    if expert >= E:
        return
    lane = block * BM + tl.arange(0, BM)
    used = lane < tl.load(counts + expert)
    pair = tl.load(order + expert * capacity + lane, mask=used, other=0)
    output = tl.program_id(1) * BN + tl.arange(0, BN)  # gate and up of a column in turn
    real = output < 2 * F
    weight_rows = output if INTERLEAVED else output % 2 * F + output // 2
    base = weight + expert.to(tl.int64) * stride_e
    total = _product(x, base, weight_rows, real, pair // active * H, H, stride_n, stride_k, BM, BN, BK, FULL, EVEN)
    kind = x.dtype.element_ty
    total = total.to(kind).to(tl.float32)
    if BIAS:
        more = tl.load(bias + expert * 2 * F + weight_rows, mask=real, other=0.0).to(tl.float32)
        total = (total + more[:, None]).to(kind).to(tl.float32)
    gate, up = tl.split(tl.reshape(tl.trans(total), [BM, BN // 2, 2]))
    if CLAMP:  # gpt-oss
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        share = tl.sigmoid((gate * alpha).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        up = (up + 1).to(kind).to(tl.float32)
    else:
        share = tl.sigmoid(gate)
    product = (gate * share).to(kind).to(tl.float32) * up
    column = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
    stored = used[:, None] & (column < F)[None, :]
    tl.store(out + pair[:, None].to(tl.int64) * F + column[None, :], product.to(kind), mask=stored)


@triton.jit
def _down(x, weight, bias, order, counts, out, capacity, H, F, E, stride_e, stride_n, stride_k, EP: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    expert, block = _find_block(counts, E, EP, BM)
    if expert >= E:
        return
    lane = block * BM + tl.arange(0, BM)
    used = lane < tl.load(counts + expert)
    pair = tl.load(order + expert * capacity + lane, mask=used, other=0)
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    real = output < H
    base = weight + expert.to(tl.int64) * stride_e
    total = _product(x, base, output, real, pair * F, F, stride_n, stride_k, BM, BN, BK, FULL, EVEN)
    kind = x.dtype.element_ty
    if BIAS:
        more = tl.load(bias + expert * H + output, mask=real, other=0.0).to(tl.float32)
        total = total.to(kind).to(tl.float32) + more[:, None]
    product = tl.trans(total).to(kind)
    tl.store(out + pair[:, None].to(tl.int64) * H + output[None, :], product, mask=used[:, None] & real[None, :])


@triton.jit
def _combine(parts, gates, out, H, K: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        part = tl.load(parts + (row * K + k) * H + column, mask=inside, other=0.0).to(tl.float32)
        weighted = part * tl.load(gates + row * K + k).to(tl.float32)
        if ROUND:
            weighted = weighted.to(out.dtype.element_ty).to(tl.float32)
        total += weighted
    tl.store(out + row * H + column, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of the experts of one layer."""

    gate_up: Tensor
    """[E, 2 F, H], a view where they are stored with the inputs first."""
    down: Tensor
    """[E, H, F], likewise"""
    gate_up_bias: Tensor | None = None
    """[E, 2 F]"""
    down_bias: Tensor | None = None
    """[E, H]"""
    interleaved: bool = False
    """Gate and up of a column are neighbours; otherwise all gates come first."""
    clamp: tuple[float, float] | None = None
    """(alpha, limit) of gpt-oss: clamped, gate * sigmoid(alpha * gate) * (up + 1); None: silu(gate) * up."""


def apply_experts(x: Tensor, experts: Tensor, gates: Tensor, weights: Weights, tiles: Tiles | None = None) -> Tensor:
    """[N, H]: for each row of x [N, H], the sum over its experts [N, K] (all different) of gate [N, K] times output."""
    rows, width = x.shape
    active, count = experts.shape[1], len(weights.gate_up)
    inner, pairs = weights.gate_up.shape[1] // 2, rows * active
    tiles = tiles or Tiles.choose(pairs, count, x.dtype, x.device)
    order = torch.empty(count, rows, dtype=torch.int32, device=x.device)
    counts = torch.empty(count, dtype=torch.int32, device=x.device)
    chunk = min(1024, max(16, triton.next_power_of_2(pairs)))
    _order[(count,)](experts, order, counts, pairs, rows, CHUNK=chunk, num_warps=4)
    # The most blocks that pairs can fill: every expert may have one that is not full.
    blocks = min(pairs, pairs // tiles.pairs + count)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    clamp, up_bias, down_bias = weights.clamp, weights.gate_up_bias, weights.down_bias
    common = {"EP": triton.next_power_of_2(count), "BM": tiles.pairs, "BN": tiles.outputs, "BK": tiles.step}
    launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    _gate_up[(blocks, triton.cdiv(2 * inner, tiles.outputs))](
        x, weights.gate_up, x if up_bias is None else up_bias, order, counts, hidden, rows, active, width, inner, count,
        *(clamp or (0.0, 0.0)), *weights.gate_up.stride(), INTERLEAVED=weights.interleaved, BIAS=up_bias is not None,
        CLAMP=clamp is not None, FULL=2 * inner % tiles.outputs == 0, EVEN=width % tiles.step == 0, **common, **launch,
    )  # fmt: skip
    _down[(blocks, triton.cdiv(width, tiles.outputs))](
        hidden, weights.down, x if down_bias is None else down_bias, order, counts, parts, rows, width, inner, count,
        *weights.down.stride(), BIAS=down_bias is not None, FULL=width % tiles.outputs == 0, EVEN=inner % tiles.step == 0,
        **common, **launch,
    )  # fmt: skip
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(width))
    _combine[(rows, triton.cdiv(width, block))](
        parts, gates, out, width, K=active, BLOCK=block, ROUND=gates.dtype == x.dtype, num_warps=4
    )
    return out
