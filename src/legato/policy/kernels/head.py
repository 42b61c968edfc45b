"""The LM head fused with log-softmax: log-probs and entropies of sampled tokens, and their gradient.

The numbers come from the float32 accumulators of the matrix product; float32 logits are never stored. While a tile of
logits [rows, TILE columns] is in registers, the kernel writes per row its maximum, the sum of exponentials relative to that
maximum, and their first moment. If a backward follows, it also stores each logit's distance to the maximum, in 16 bits. That
is precise enough: a distance near 0 has a tiny rounding error, and a token at a large distance has no probability. Exponents
are base 2.

    project            per tile: best m, total sum 2^(z - m), moment sum 2^(z - m) (z - m), the target's z, distances z - m
    fold               over the tiles of a row: normaliser, log-prob, entropy
    project_backward   overwrites the distances with the gradient of the product

`project` is one kernel on GPUs with the Tensor Memory Accelerator. Elsewhere cuBLAS computes the product in float32, and a
second kernel reduces it.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE = 256
_ROWS, _STEP, _GROUP = 128, 64, 16
_LAUNCH = {"num_warps": 8, "num_stages": 3}
"""Launch options of the kernel that multiplies and reduces."""
_AT_ONCE = 1024
"""Rows whose float32 logits are allocated at once where multiplying and reducing are two kernels."""
_LOG2E = 1.4426950408889634


@triton.jit
def _finish(z, at, to, targets, scales, best_out, total_out, moment_out, chosen_out, distances, stride, N, V, multiplier,
            BM: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr, KEEP: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Reduce one tile of logits z [BM, TILE] and store the results; `at` and `to` are the tile's row and column numbers."""
    rows, columns = at * BM + tl.arange(0, BM), to * TILE + tl.arange(0, TILE)
    inside = rows < N
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2 x) - 1
        z = (2 * tl.sigmoid(z * (2 * multiplier / SOFTCAP)) - 1) * SOFTCAP
        z = z * tl.load(scales + rows, mask=inside, other=0.0)[:, None]
    else:
        z = z * (tl.load(scales + rows, mask=inside, other=0.0) * multiplier)[:, None]
    if (to + 1) * TILE > V:
        z = tl.where((columns < V)[None, :], z, -1e30)
    best = tl.max(z, 1)
    z = z - best[:, None]
    each = tl.exp2(z)
    place = to * N + rows
    tl.store(best_out + place, best, mask=inside)
    tl.store(total_out + place, tl.sum(each, 1), mask=inside)
    tl.store(moment_out + place, tl.sum(each * z, 1), mask=inside)
    target = tl.load(targets + rows, mask=inside, other=-1)
    here = (target >= to * TILE) & (target < (to + 1) * TILE)
    # Most tiles hold no target of their rows.
    if tl.max(here.to(tl.int32), 0) > 0:
        target_z = tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1) + best
        tl.store(chosen_out + rows, target_z, mask=inside & here)
    if KEEP:
        if DESCRIPTORS:
            distances.store([at * BM, to * TILE], z.to(distances.dtype))
        else:
            spot = distances + rows.to(tl.int64)[:, None] * stride + columns[None, :]
            tl.store(spot, z.to(distances.dtype.element_ty), mask=inside[:, None] & (columns < V)[None, :])


@triton.jit
def _project(hidden, weight, targets, scales, best_out, total_out, moment_out, chosen_out, distances, stride, N, V, H,
             multiplier, BM: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
             PROGRAMS: tl.constexpr, SOFTCAP: tl.constexpr, KEEP: tl.constexpr):
    down, across = tl.cdiv(N, BM), tl.cdiv(V, TILE)
    # Flattened, a tile's first loads start while the previous tile is still being reduced. Without stored distances
    # Triton 3.6 cannot compile the flattened loop, and there is less to wait for.
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=KEEP):
        # Walk tiles in stripes of GROUP rows, so that a stripe of the weight stays in the cache.
        first = tile // (GROUP * across) * GROUP
        high = tl.minimum(down - first, GROUP)
        at, to = first + tile % (GROUP * across) % high, tile % (GROUP * across) // high
        product = tl.zeros((BM, TILE), dtype=tl.float32)
        for step in range(tl.cdiv(H, BK)):
            x = hidden.load([at * BM, step * BK])
            w = weight.load([to * TILE, step * BK])
            product = tl.dot(x, w.T, product)
        _finish(product, at, to, targets, scales, best_out, total_out, moment_out, chosen_out, distances, stride, N, V,
                multiplier, BM, TILE, SOFTCAP, KEEP, True)


@triton.jit
def _finish_product(product, targets, scales, best_out, total_out, moment_out, chosen_out, distances, stride, FIRST, COUNT,
                    N, V, multiplier, BM: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr, KEEP: tl.constexpr):
    at, to = FIRST // BM + tl.program_id(0), tl.program_id(1)
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), to * TILE + tl.arange(0, TILE)
    z = tl.load(product + rows.to(tl.int64)[:, None] * V + columns[None, :],
                mask=(rows < COUNT)[:, None] & (columns < V)[None, :], other=0.0)
    _finish(z, at, to, targets, scales, best_out, total_out, moment_out, chosen_out, distances, stride, N, V, multiplier,
            BM, TILE, SOFTCAP, KEEP, False)


# Not specialised by the number of rows: Triton would load rows of another alignment in another layout and add up in another
# order, and the bits of a token would depend on how many tokens are scored with it.
@triton.jit(do_not_specialize=["N"])
def _fold(best_in, total_in, moment_in, chosen_in, normaliser_out, logprob_out, entropy_out, N, TILES, ROWS: tl.constexpr,
          BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    moment = tl.full([ROWS], 0.0, tl.float32)
    for start in range(0, TILES, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        known = (tile < TILES)[:, None] & inside[None, :]
        place = tile[:, None] * N + rows[None, :]
        tops = tl.load(best_in + place, mask=known, other=-1e30)
        totals = tl.load(total_in + place, mask=known, other=0.0)
        moments = tl.load(moment_in + place, mask=known, other=0.0)
        higher = tl.maximum(best, tl.max(tops, 0))
        # A tile 127 or more below the maximum adds nothing; the clamp keeps the difference from overflowing.
        below, lower = tl.maximum(tops - higher[None, :], -1000.0), tl.maximum(best - higher, -1000.0)
        share, shrink = tl.exp2(below), tl.exp2(lower)
        moment = (moment + total * lower) * shrink + tl.sum(share * (moments + totals * below), 0)
        total = total * shrink + tl.sum(share * totals, 0)
        best = higher
    normaliser = best + tl.log2(total)
    chosen = tl.load(chosen_in + rows, mask=inside, other=0.0)
    tl.store(normaliser_out + rows, normaliser, mask=inside)
    tl.store(logprob_out + rows, (chosen - normaliser) * 0.6931471805599453, mask=inside)
    # entropy = lse - E[z] = (m + log l) - (m + moment / l)
    tl.store(entropy_out + rows, (tl.log2(total) - moment / total) * 0.6931471805599453, mask=inside)


@triton.jit
def _project_backward(distances, targets, scales, best, normaliser, entropy, to_logprobs, to_entropy, stride, N, V,
                      multiplier, TILE: tl.constexpr, AT_ONCE: tl.constexpr, SOFTCAP: tl.constexpr,
                      WITH_ENTROPY: tl.constexpr):
    row = tl.program_id(0)
    tiles = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = columns < V
    spot = distances + row.to(tl.int64) * stride + columns
    z = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(best + tiles * N + row, mask=tiles * TILE < V, other=0.0)[:, None]
    below = z - tl.load(normaliser + row)
    p = tl.exp2(below)
    to_logprob, scale = tl.load(to_logprobs + row), tl.load(scales + row)
    gradient = tl.where(columns == tl.load(targets + row), to_logprob, 0.0) - to_logprob * p
    if WITH_ENTROPY:
        gradient -= tl.load(to_entropy + row) * p * (below * 0.6931471805599453 + tl.load(entropy + row))
    gradient *= scale * (0.6931471805599453 * multiplier)
    if SOFTCAP > 0:
        capped = z / (scale * SOFTCAP)
        gradient *= 1 - capped * capped
    tl.store(spot, gradient.to(distances.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Results of `project` for K targets; `distances` [K, V] is None unless `keep` was set."""

    logprobs: Tensor
    entropy: Tensor
    normaliser: Tensor
    best: Tensor
    """[tiles, K]"""
    scales: Tensor
    """[K]: log2(e) / temperature."""
    distances: Tensor | None


def project(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    keep: bool = False,
) -> Projection:
    """Log-probs and entropies of `targets` [K] under softmax(cap(hidden weight^T * multiplier) / temperature).

    `keep` stores the distances that `project_backward` needs for the backward.
    """
    rows, vocabulary = len(hidden), len(weight)
    tiles, device = triton.cdiv(vocabulary, TILE), hidden.device
    best, total, moment = (torch.empty(tiles, rows, dtype=torch.float32, device=device) for _ in range(3))
    chosen, normaliser, logprobs, entropy = (torch.zeros(rows, dtype=torch.float32, device=device) for _ in range(4))
    scales = temperature.float().reciprocal() * _LOG2E
    # Rows padded to a multiple of 16 bytes, for which matrix products are fastest.
    distances = torch.empty(rows, -(-vocabulary // 8) * 8, dtype=hidden.dtype, device=device) if keep else None
    out = hidden if distances is None else distances
    buffers = (targets, scales, best, total, moment, chosen)
    common = {"TILE": TILE, "SOFTCAP": softcap or 0.0, "KEEP": keep}
    if rows and tensor_memory(hidden):
        programs = multiprocessors(device)
        descriptor = TensorDescriptor.from_tensor(out[:, :vocabulary] if keep else hidden, [_ROWS, TILE if keep else _STEP])
        _project[(programs,)](
            TensorDescriptor.from_tensor(hidden, [_ROWS, _STEP]), TensorDescriptor.from_tensor(weight, [TILE, _STEP]),
            *buffers, descriptor, out.stride(0), rows, vocabulary, hidden.shape[1], multiplier, BM=_ROWS, BK=_STEP,
            GROUP=_GROUP, PROGRAMS=programs, **_LAUNCH, **common,
        )  # fmt: skip
    elif rows:
        for first in range(0, rows, _AT_ONCE):
            product = wide_product(hidden[first : first + _AT_ONCE], weight.t())
            _finish_product[(triton.cdiv(len(product), _ROWS // 2), tiles)](
                product, *buffers, out, out.stride(0), first, len(product), rows, vocabulary, multiplier, BM=_ROWS // 2,
                num_warps=8, **common,
            )  # fmt: skip
    if rows:
        # Few rows per program: each program walks all tiles, so more programs mean more parallelism.
        _fold[(triton.cdiv(rows, 8),)](
            best, total, moment, chosen, normaliser, logprobs, entropy, rows, tiles, ROWS=8, BLOCK=128
        )
    return Projection(
        logprobs=logprobs,
        entropy=entropy,
        normaliser=normaliser,
        best=best,
        scales=scales,
        distances=None if distances is None else distances[:, :vocabulary],
    )


def project_backward(
    projection: Projection,
    targets: Tensor,
    to_logprobs: Tensor,
    to_entropy: Tensor | None,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Gradient of the product `hidden weight^T`, [K, V]. It overwrites `projection.distances`.

    `to_logprobs` and `to_entropy` [K] are the gradients of log-probs and entropies.
    """
    distances = projection.distances
    assert distances is not None
    rows, vocabulary = distances.shape
    if rows:
        _project_backward[(rows, triton.cdiv(vocabulary, 16 * TILE))](
            distances, targets, projection.scales, projection.best, projection.normaliser, projection.entropy,
            to_logprobs.contiguous(), (to_logprobs if to_entropy is None else to_entropy).contiguous(),
            distances.stride(0), rows, vocabulary, multiplier, TILE=TILE, AT_ONCE=16, SOFTCAP=softcap or 0.0,
            WITH_ENTROPY=to_entropy is not None, num_warps=8,
        )  # fmt: skip
    return distances


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply 16-bit matrices and return the float32 accumulators, not rounded."""
    if not left.is_cuda:
        return left.float() @ right.float()
    result: Tensor = torch.mm(left, right, out_dtype=torch.float32)
    return result


def tensor_memory(hidden: Tensor) -> bool:
    """Whether the GPU can load tiles through tensor descriptors: data-centre Hopper and Blackwell, and the interpreter."""
    if not hidden.is_cuda:
        return True  # Triton's interpreter
    return _generation(hidden.device) in (9, 10) and hidden.shape[1] % 8 == 0


# Cached: both are read several times per layer, and torch takes a while to answer.
@cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 2 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
