"""The kernels of the GPU engine in plain torch, one row at a time.

Triton's interpreter takes a tenth of a second per row and layer, so tests of the code around the kernels use these instead.
`tests/policy/test_kernels.py` tests the kernels against torch; `test_slots.py` runs whole engines with the real kernels.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from legato.rollouts.gpu import buckets
from legato.rollouts.gpu import engine as graphed
from legato.rollouts.randomness import uniform
from legato.rollouts.sampling import Sampling, choose


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buckets, "store_kv", store_kv)
    patch.setattr(buckets, "attend_slots", attend_slots)
    patch.setattr(buckets, "heads_ready", heads_ready)
    patch.setattr(buckets, "add_norm", add_norm)
    patch.setattr(buckets, "swiglu", lambda gate, up: silu(gate) * up)
    patch.setattr(graphed, "sample", sample)
    patch.setattr(graphed, "find_grouped", lambda body: None)  # experts then run through the model's own layers


def store_kv(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, slot_length: Tensor) -> None:
    keys[slots, :, slot_length[slots]] = key
    values[slots, :, slot_length[slots]] = value


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
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    **_: Any,
) -> Tensor:
    owner = {row: int(block_prompt[block]) for block, row in block_rows_of(block_rows)}
    out = torch.zeros_like(query)
    for row, slot in enumerate(slots.tolist()):
        own = slice(0, int(slot_length[slot]) + 1)
        key, value = keys[slot][:, own], values[slot][:, own]
        if row in owner:
            shared = slice(0, int(prompt_length[owner[row]]))
            key = torch.cat([prompt_keys[owner[row]][:, shared], key], 1)
            value = torch.cat([prompt_values[owner[row]][:, shared], value], 1)
        repeat = query.shape[1] // len(key)
        scores = torch.einsum("hd,hld->hl", query[row], key.repeat_interleave(repeat, 0)) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if window:
            scores[:, : max(0, scores.shape[1] - window)] = -torch.inf
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        weights = scores.softmax(1)[:, : key.shape[1]]
        out[row] = torch.einsum("hl,hld->hd", weights, value.repeat_interleave(repeat, 0))
    return out


def block_rows_of(block_rows: Tensor) -> list[tuple[int, int]]:
    """(block, row) pairs of all rows in blocks."""
    return [(block, row) for block, rows in enumerate(block_rows.tolist()) for row in rows if row >= 0]


def heads_ready(
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
    query, key, value = (x.reshape(len(x), -1, width) for x in (query, key, value))
    if norms is not None:
        query, key = rms_norm(query, (width,), norms[0], norms[2]), rms_norm(key, (width,), norms[1], norms[2])
    rotated = []
    for x in (query, key):
        low, high = x.chunk(2, -1)
        rotated.append(x * cosine[:, None] + torch.cat([-high, low], -1) * sine[:, None])
    store_kv(rotated[1], value, keys, values, slots, slot_length)
    return rotated[0]


def add_norm(residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = residual if update is None else residual + update
    return total, rms_norm(total, (total.shape[1],), weight, epsilon)


def sample(
    logits: Tensor, slots: Tensor, seeds: Tensor, places: Tensor, *, temperature: float, add: int
) -> tuple[Tensor, Tensor]:
    choice = choose(logits, uniform(seeds[slots], places[slots] + add), Sampling(temperature=temperature))
    return choice.tokens, choice.logprobs
