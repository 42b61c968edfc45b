"""The small parts of a decoder layer with backward: residual add with norm, rotary embedding of normed heads, SwiGLU.

The forward kernels are those of decoding (`layers.py`), or they round in the same places. The backward kernels save only
their inputs and recompute the rest. The gradient of a norm's weight is summed per program, then over programs, so its order
is fixed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from legato.policy.kernels.head import multiprocessors
from legato.policy.kernels.layers import add_norm, swiglu

_BLOCK = 1024


@triton.jit
def _norm_backward(total, weight, to_out, to_total, to_x, to_weight, out, epsilon, R, N, NP: tl.constexpr,
                   ADD: tl.constexpr, LEARN: tl.constexpr, RECOMPUTE: tl.constexpr):
    columns = tl.arange(0, NP)
    inside = columns < N
    w = tl.load(weight + columns, mask=inside, other=0.0)
    weight_gradient = tl.zeros([NP], tl.float32)
    stride = tl.full([], 0, tl.int64) + N
    for row in range(tl.program_id(0), R, tl.num_programs(0)):
        place = row * stride + columns
        x = tl.load(total + place, mask=inside, other=0.0)
        exact = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(exact * exact, 0) / N + epsilon)
        normed = exact * scale
        if RECOMPUTE:
            recomputed = normed.to(x.dtype).to(tl.float32) * w.to(tl.float32)
            tl.store(out + place, recomputed.to(x.dtype), mask=inside)
        to_normed = tl.load(to_out + place, mask=inside, other=0.0).to(tl.float32)
        if LEARN:
            weight_gradient += to_normed * normed.to(x.dtype).to(tl.float32)
        to_normed *= w.to(tl.float32)
        gradient = scale * (to_normed - normed * (tl.sum(to_normed * normed, 0) / N))
        if ADD:
            gradient += tl.load(to_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(to_x + place, gradient.to(x.dtype), mask=inside)
    if LEARN:
        tl.store(to_weight + tl.program_id(0) * N + columns, weight_gradient, mask=inside)


def _programs(rows: int, device: torch.device) -> int:
    """How many programs fill the device; each sums the weight's gradient over its own rows."""
    return max(1, min(rows, 8 * multiprocessors(device) if device.type == "cuda" else 4))


def norm_backward(
    total: Tensor,
    weight: Tensor,
    epsilon: float,
    to_out: Tensor,
    to_total: Tensor | None,
    *,
    learns: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `total` and, in float32, of the weight, for `out = norm(total) * weight`.

    `to_out` is the gradient of the norm's output, `to_total` a second gradient of `total` to add. If `out` is given, the
    kernel writes the recomputed norm into it.
    """
    rows, width = total.shape
    programs = _programs(rows, total.device)
    gradient = torch.empty_like(total)
    parts = torch.empty(programs, width, dtype=torch.float32, device=total.device) if learns else gradient
    _norm_backward[(programs,)](
        total, weight, to_out.contiguous(), gradient if to_total is None else to_total.contiguous(), gradient, parts,
        gradient if out is None else out, epsilon, rows, width, NP=triton.next_power_of_2(width), ADD=to_total is not None,
        LEARN=learns, RECOMPUTE=out is not None, num_warps=4 if width <= 4096 else 8,
    )  # fmt: skip
    return gradient, parts.sum(0) if learns else None


class _AddNorm(torch.autograd.Function):
    """(residual + update, its norm). Without an update the first result is an empty tensor."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total, out = add_norm(residual, update, weight, epsilon)
        ctx.save_for_backward(total, weight)
        ctx.epsilon, ctx.adds = epsilon, update is not None
        ctx.set_materialize_grads(False)
        if update is None:
            total = torch.empty(0, device=residual.device)
            ctx.mark_non_differentiable(total)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        to_total, to_out = gradients
        if not ctx.adds:
            to_total = None
        if to_out is None:
            return to_total, to_total if ctx.adds else None, None, None
        to_residual, to_weight = norm_backward(total, weight, ctx.epsilon, to_out, to_total, learns=ctx.needs_input_grad[2])
        return to_residual, to_residual if ctx.adds else None, to_weight, None


def add_norm_with_gradient(residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`layers.add_norm` with a backward."""
    total, out = _AddNorm.apply(residual, update, weight, epsilon)
    return residual if update is None else total, out


@triton.jit
def rotated(source, cosine, sine, weight, epsilon, pair, half, inside, HEADS, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves [pairs, HALF] of some heads, normed and rotated; a pair is one head of one token."""
    low_at = pair.to(tl.int64)[:, None] * D + half[None, :]
    return rotated_at(source, low_at, cosine, sine, weight, epsilon, pair, half, inside, HEADS, D, NORM)


@triton.jit
def rotated_at(source, low_at, cosine, sine, weight, epsilon, pair, half, inside, HEADS, D: tl.constexpr,
               NORM: tl.constexpr):
    """The same of heads that begin at `low_at` [pairs, HALF]."""
    angle_at = (pair // HEADS).to(tl.int64)[:, None] * D + half[None, :]
    low = tl.load(source + low_at, mask=inside, other=0.0)
    high = tl.load(source + low_at + D // 2, mask=inside, other=0.0)
    kind = low.dtype
    if NORM:
        a, b = low.to(tl.float32), high.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + epsilon)[:, None]
        w_low = tl.load(weight + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
        w_high = tl.load(weight + D // 2 + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
        low = ((a * scale).to(kind).to(tl.float32) * w_low).to(kind)
        high = ((b * scale).to(kind).to(tl.float32) * w_high).to(kind)
    x, y = low.to(tl.float32), high.to(tl.float32)
    c_low = tl.load(cosine + angle_at, mask=inside, other=0.0).to(tl.float32)
    c_high = tl.load(cosine + angle_at + D // 2, mask=inside, other=0.0).to(tl.float32)
    s_low = tl.load(sine + angle_at, mask=inside, other=0.0).to(tl.float32)
    s_high = tl.load(sine + angle_at + D // 2, mask=inside, other=0.0).to(tl.float32)
    rotated_low = ((x * c_low).to(kind).to(tl.float32) + (-y * s_low).to(kind).to(tl.float32)).to(kind)
    rotated_high = ((y * c_high).to(kind).to(tl.float32) + (x * s_high).to(kind).to(tl.float32)).to(kind)
    return rotated_low, rotated_high


@triton.jit
def _rotate(source, cosine, sine, weight, out, epsilon, PAIRS, HEADS, D: tl.constexpr, HALF: tl.constexpr,
            BLOCK: tl.constexpr, NORM: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, HALF)
    inside = (pair < PAIRS)[:, None] & (half < D // 2)[None, :]
    low, high = rotated(source, cosine, sine, weight, epsilon, pair, half, inside, HEADS, D, NORM)
    low_at = pair.to(tl.int64)[:, None] * D + half[None, :]
    tl.store(out + low_at, low, mask=inside)
    tl.store(out + low_at + D // 2, high, mask=inside)


@triton.jit
def _rotate_backward(source, cosine, sine, weight, to_out, to_source, to_weight, epsilon, PAIRS, HEADS, D: tl.constexpr,
                     HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, LEARN: tl.constexpr):
    half = tl.arange(0, HALF)
    weight_gradient_low = tl.zeros([HALF], tl.float32)
    weight_gradient_high = tl.zeros([HALF], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, PAIRS, tl.num_programs(0) * BLOCK):
        pair = start + tl.arange(0, BLOCK)
        inside = (pair < PAIRS)[:, None] & (half < D // 2)[None, :]
        low_at = pair.to(tl.int64)[:, None] * D + half[None, :]
        angle_at = (pair // HEADS).to(tl.int64)[:, None] * D + half[None, :]
        c_low = tl.load(cosine + angle_at, mask=inside, other=0.0).to(tl.float32)
        c_high = tl.load(cosine + angle_at + D // 2, mask=inside, other=0.0).to(tl.float32)
        s_low = tl.load(sine + angle_at, mask=inside, other=0.0).to(tl.float32)
        s_high = tl.load(sine + angle_at + D // 2, mask=inside, other=0.0).to(tl.float32)
        to_out_low = tl.load(to_out + low_at, mask=inside, other=0.0).to(tl.float32)
        to_out_high = tl.load(to_out + low_at + D // 2, mask=inside, other=0.0).to(tl.float32)
        gradient_low = to_out_low * c_low + to_out_high * s_high
        gradient_high = to_out_high * c_high - to_out_low * s_low
        if NORM:
            low = tl.load(source + low_at, mask=inside, other=0.0)
            high = tl.load(source + low_at + D // 2, mask=inside, other=0.0)
            a, b = low.to(tl.float32), high.to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + epsilon)[:, None]
            a *= scale
            b *= scale
            if LEARN:
                weight_gradient_low += tl.sum(gradient_low * a.to(low.dtype).to(tl.float32), 0)
                weight_gradient_high += tl.sum(gradient_high * b.to(low.dtype).to(tl.float32), 0)
            gradient_low *= tl.load(weight + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
            gradient_high *= tl.load(weight + D // 2 + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
            mean = ((tl.sum(gradient_low * a, 1) + tl.sum(gradient_high * b, 1)) / D)[:, None]
            gradient_low = scale * (gradient_low - a * mean)
            gradient_high = scale * (gradient_high - b * mean)
        tl.store(to_source + low_at, gradient_low.to(to_source.dtype.element_ty), mask=inside)
        tl.store(to_source + low_at + D // 2, gradient_high.to(to_source.dtype.element_ty), mask=inside)
    if LEARN:
        place = to_weight + tl.program_id(0) * D + half
        tl.store(place, weight_gradient_low, mask=half < D // 2)
        tl.store(place + D // 2, weight_gradient_high, mask=half < D // 2)


def rotation_blocks(width: int) -> tuple[int, int]:
    """The padded half of a head, and how many heads a program rotates; both decide the order of a head's sums."""
    half = triton.next_power_of_2(width // 2)
    return half, max(1, _BLOCK // half)


def rotate_forward(
    source: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None, epsilon: float, width: int
) -> Tensor:
    """Apply the rotary embedding: [R, heads * width] to [R, heads, width]. With a weight, heads are RMS-normed first."""
    heads = source.shape[1] // width
    pairs = len(source) * heads
    out = torch.empty(len(source), heads, width, dtype=source.dtype, device=source.device)
    half, block = rotation_blocks(width)
    _rotate[(triton.cdiv(pairs, block),)](
        source, cosine, sine, cosine if weight is None else weight, out, epsilon, pairs, heads,
        D=width, HALF=half, BLOCK=block, NORM=weight is not None, num_warps=4,
    )  # fmt: skip
    return out


def rotate_backward(
    source: Tensor,
    cosine: Tensor,
    sine: Tensor,
    weight: Tensor | None,
    epsilon: float,
    to_out: Tensor,
    *,
    learns: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `source` and, in float32, of the norm's weight; `to_out` [R, heads, width] is the output's gradient."""
    width = to_out.shape[-1]
    heads = source.shape[1] // width
    pairs, half = len(source) * heads, triton.next_power_of_2(width // 2)
    block = max(1, 2 * _BLOCK // half)
    programs = _programs(triton.cdiv(pairs, block), source.device)
    to_source = torch.empty_like(source)
    parts = torch.empty(programs, width, dtype=torch.float32, device=source.device) if learns else to_source
    _rotate_backward[(programs,)](
        source, cosine, sine, cosine if weight is None else weight, to_out.contiguous(), to_source, parts, epsilon, pairs,
        heads, D=width, HALF=half, BLOCK=block, NORM=weight is not None, LEARN=learns, num_warps=4,
    )  # fmt: skip
    return to_source, parts.sum(0) if learns else None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None, epsilon: float, width: int
    ) -> Tensor:
        source = source.contiguous()
        ctx.save_for_backward(source, cosine, sine, weight)
        ctx.epsilon = epsilon
        return rotate_forward(source, cosine, sine, weight, epsilon, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, cosine, sine, weight = ctx.saved_tensors
        learns = weight is not None and ctx.needs_input_grad[3]
        to_source, to_weight = rotate_backward(source, cosine, sine, weight, ctx.epsilon, gradients[0], learns=learns)
        return to_source, None, None, to_weight, None, None


def rotate(source: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None, epsilon: float, width: int) -> Tensor:
    """`rotate_forward` with a backward."""
    out: Tensor = _Rotate.apply(source, cosine, sine, weight, epsilon, width)
    return out


@triton.jit
def _swiglu_backward(gate, up, to_out, to_gate, to_up, out, N, BLOCK: tl.constexpr, RECOMPUTE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < N
    g = tl.load(gate + place, mask=inside, other=0.0)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(to_out + place, mask=inside, other=0.0).to(tl.float32)
    x = g.to(tl.float32)
    share = tl.sigmoid(x)
    activated = (x * share).to(g.dtype).to(tl.float32)
    if RECOMPUTE:
        tl.store(out + place, (activated * u).to(g.dtype), mask=inside)
    # If `to_up` shares the memory of `to_out`: this element was read above, and no other program reads it.
    tl.store(to_up + place, (gradient * activated).to(g.dtype), mask=inside)
    tl.store(to_gate + place, (gradient * u * share * (1 + x * (1 - share))).to(g.dtype), mask=inside)


def swiglu_backward(gate: Tensor, up: Tensor, to_out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
    _launch_swiglu_backward(gate, up, to_out.contiguous(), to_gate, to_up, None)
    return to_gate, to_up


def recompute_swiglu_and_backward(gate: Tensor, up: Tensor, to_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, recomputed, and the gradients of gate and up. The gradient of up overwrites `to_out`."""
    out, to_gate = torch.empty_like(gate), torch.empty_like(gate)
    _launch_swiglu_backward(gate, up, to_out, to_gate, to_out, out)
    return out, to_gate, to_out


def _launch_swiglu_backward(
    gate: Tensor, up: Tensor, to_out: Tensor, to_gate: Tensor, to_up: Tensor, out: Tensor | None
) -> None:
    count = gate.numel()
    _swiglu_backward[(triton.cdiv(count, _BLOCK),)](
        gate, up, to_out, to_gate, to_up, to_gate if out is None else out, count, BLOCK=_BLOCK, RECOMPUTE=out is not None,
        num_warps=4,
    )  # fmt: skip


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return swiglu_backward(gate, up, gradients[0])


def swiglu_with_gradient(gate: Tensor, up: Tensor) -> Tensor:
    """`layers.swiglu` with a backward."""
    out: Tensor = _SwiGLU.apply(gate, up)
    return out
