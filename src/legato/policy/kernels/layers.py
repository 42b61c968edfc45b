"""The small parts of a decoder layer, one kernel each: residual add with norm, rotary embedding of heads, SwiGLU.

They round where the modules of transformers round (after the norm, after each product with a weight), so that a fused body
and the plain one differ only in the order of sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, count, epsilon):
    """RMS norm of one vector in float32, rounded before and after the weight as transformers does."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / count + epsilon)
    rounded = (x * scale).to(weight.dtype)
    return (rounded.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def _add_norm(residual, update, weight, residual_out, out, epsilon, N, NP: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, NP)
    inside = columns < N
    place = row.to(tl.int64) * N + columns
    x = tl.load(residual + place, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(update + place, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual_out + place, x, mask=inside)
    w = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + place, _rms_norm(x.to(tl.float32), w, N, epsilon), mask=inside)


def add_norm(residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(residual + update, its RMS norm times the weight), both [R, N]. Without an update the first is `residual`."""
    rows, width = residual.shape
    out = torch.empty_like(residual)
    total = residual if update is None else torch.empty_like(residual)
    _add_norm[(rows,)](
        residual, residual if update is None else update, weight, total, out, epsilon, width,
        NP=triton.next_power_of_2(width), ADD=update is not None, num_warps=4 if width <= 4096 else 8,
    )  # fmt: skip
    return total, out


@triton.jit
def _heads(
    query,
    key,
    value,
    cosine,
    sine,
    query_norm,
    key_norm,
    query_out,
    keys,
    values,
    slots,
    slot_length,
    epsilon,
    query_stride,
    key_stride,
    value_stride,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = half < D // 2
    slot = tl.load(slots + row)
    column = tl.load(slot_length + slot)
    if head < H + K:
        if head < H:
            source = query + row.to(tl.int64) * query_stride + head * D
            norm = query_norm
        else:
            source = key + row.to(tl.int64) * key_stride + (head - H) * D
            norm = key_norm
        low = tl.load(source + half, mask=inside, other=0.0)
        high = tl.load(source + D // 2 + half, mask=inside, other=0.0)
        kind = low.dtype
        if NORM:
            a, b = low.to(tl.float32), high.to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + epsilon)
            weight_low = tl.load(norm + half, mask=inside, other=0.0)
            weight_high = tl.load(norm + D // 2 + half, mask=inside, other=0.0)
            low = ((a * scale).to(kind).to(tl.float32) * weight_low.to(tl.float32)).to(kind)
            high = ((b * scale).to(kind).to(tl.float32) * weight_high.to(tl.float32)).to(kind)
        c_low = tl.load(cosine + row * D + half, mask=inside, other=0.0).to(tl.float32)
        c_high = tl.load(cosine + row * D + D // 2 + half, mask=inside, other=0.0).to(tl.float32)
        s_low = tl.load(sine + row * D + half, mask=inside, other=0.0).to(tl.float32)
        s_high = tl.load(sine + row * D + D // 2 + half, mask=inside, other=0.0).to(tl.float32)
        x, y = low.to(tl.float32), high.to(tl.float32)
        rotated_low = ((x * c_low).to(kind).to(tl.float32) + (-y * s_low).to(kind).to(tl.float32)).to(kind)
        rotated_high = ((y * c_high).to(kind).to(tl.float32) + (x * s_high).to(kind).to(tl.float32)).to(kind)
        if head < H:
            target = query_out + (row * H + head) * D
        else:
            target = keys + ((slot.to(tl.int64) * K + head - H) * T + column) * D
        tl.store(target + half, rotated_low, mask=inside)
        tl.store(target + D // 2 + half, rotated_high, mask=inside)
    else:
        source = value + row.to(tl.int64) * value_stride + (head - H - K) * D
        target = values + ((slot.to(tl.int64) * K + head - H - K) * T + column) * D
        tl.store(target + half, tl.load(source + half, mask=inside), mask=inside)
        tl.store(target + D // 2 + half, tl.load(source + D // 2 + half, mask=inside), mask=inside)


def heads(
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
    """Rotate queries and keys by their position and store keys and values in the KV cache; returns queries [R, H, D].

    With `norms`, heads are RMS-normed first. `query` is [R, H * D], `key` and `value` [R, K * D], `cosine` and `sine`
    [R, D]. The first three may be columns of one tensor. Each key and value goes to the next column of its row's slot.
    """
    rows = len(query)
    count, key_heads = query.shape[1] // width, key.shape[1] // width
    out = torch.empty(rows, count, width, dtype=query.dtype, device=query.device)
    query_norm, key_norm, epsilon = (cosine, cosine, 0.0) if norms is None else norms
    _heads[(rows, count + 2 * key_heads)](
        query, key, value, cosine, sine, query_norm, key_norm, out, keys, values, slots, slot_length, epsilon,
        query.stride(0), key.stride(0), value.stride(0), keys.shape[2], H=count, K=key_heads, D=width,
        HALF=triton.next_power_of_2(width // 2), NORM=norms is not None, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu(gate, up, out, N, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < N
    g = tl.load(gate + place, mask=inside, other=0.0)
    u = tl.load(up + place, mask=inside, other=0.0)
    x = g.to(tl.float32)
    activated = (x * tl.sigmoid(x)).to(g.dtype)
    tl.store(out + place, (activated.to(tl.float32) * u.to(tl.float32)).to(g.dtype), mask=inside)


@triton.jit
def _swiglu_columns(gate, up, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * stride + column, mask=inside, other=0.0)
    u = tl.load(up + row * stride + column, mask=inside, other=0.0)
    x = g.to(tl.float32)
    activated = (x * tl.sigmoid(x)).to(g.dtype)
    tl.store(out + row * width + column, (activated.to(tl.float32) * u.to(tl.float32)).to(g.dtype), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [R, N] or columns of one tensor."""
    count = gate.numel()
    if not (gate.is_contiguous() and up.is_contiguous()):
        rows, width = gate.shape
        out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
        assert gate.stride() == up.stride() and gate.stride(1) == 1, "gate and up are columns of one tensor"
        grid = rows, triton.cdiv(width, 1024)
        _swiglu_columns[grid](gate, up, out, width, gate.stride(0), BLOCK=1024, num_warps=4)
        return out
    out = torch.empty_like(gate)
    _swiglu[(triton.cdiv(count, 1024),)](gate, up, out, count, BLOCK=1024, num_warps=4)
    return out
