"""Sample a token from logits with one uniform number u per row, and compute its log-prob. Logits are read about once.

    chunks    each program reads one chunk of a row: its maximum and its sum of exponentials relative to that, in float32
    pick      one program per row finds the chunk in which the cumulative sum reaches u times the total, reads that chunk
              again, and finds the token in it; the log-prob comes from the same float32 numbers
The uniform number is splitmix64 of (seed, place), as in `rollouts/randomness.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024


@triton.jit
def _chunks(logits, best_out, total_out, inverse_temperature, V, CHUNKS, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits + row.to(tl.int64) * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    z = z * inverse_temperature
    best = tl.max(z, 0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    tl.store(best_out + row * CHUNKS + chunk, best)
    tl.store(total_out + row * CHUNKS + chunk, tl.sum(tl.exp(z - safe), 0))


@triton.jit
def _uniform(seed, place):
    """A uniform number in [0, 1) from the top 53 bits of splitmix64(seed, place)."""
    state = seed.to(tl.uint64) + (place.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _pick(logits, best_in, total_in, slots, seeds, places, tokens_out, logprobs_out, inverse_temperature, V, CHUNKS, ADD,
          CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, GREEDY: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    number = tl.arange(0, CHUNKS_PAD)
    best = tl.load(best_in + row * CHUNKS + number, mask=number < CHUNKS, other=float("-inf"))
    total = tl.load(total_in + row * CHUNKS + number, mask=number < CHUNKS, other=0.0)
    top = tl.max(best, 0)
    mass = tl.where(total > 0, total * tl.exp(best - top), 0.0).to(tl.float64)
    whole = tl.sum(mass, 0)
    if GREEDY:
        chunk = tl.min(tl.where(best == top, number, CHUNKS_PAD), 0)
        before = tl.zeros([], tl.float64)
        target = tl.zeros([], tl.float64)
    else:
        target = _uniform(tl.load(seeds + slot), tl.load(places + slot) + ADD) * whole
        up_to = tl.cumsum(mass, 0)
        chunk = tl.min(tl.where((up_to > target) & (mass > 0), number, CHUNKS_PAD), 0)
        last = tl.max(tl.where(mass > 0, number, 0), 0)
        chunk = tl.minimum(chunk, last)
        before = tl.sum(tl.where(number < chunk, mass, 0.0), 0)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits + row.to(tl.int64) * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    z = z * inverse_temperature
    if GREEDY:
        token = tl.min(tl.where(z == top, columns, 2147483647), 0)
    else:
        each = tl.exp(z - top).to(tl.float64)
        reached = before + tl.cumsum(each, 0)
        token = tl.min(tl.where((reached > target) & (each > 0), columns, 2147483647), 0)
        token = tl.minimum(token, tl.max(tl.where(each > 0, columns, 0), 0))
    chosen = tl.sum(tl.where(columns == token, z, 0.0), 0)
    tl.store(tokens_out + row, token.to(tl.int64))
    tl.store(logprobs_out + row, chosen - top - tl.log(whole.to(tl.float32)))


def sample(
    logits: Tensor, slots: Tensor, seeds: Tensor, places: Tensor, *, temperature: float, add: int = 0
) -> tuple[Tensor, Tensor]:
    """Sample tokens [R] and their float32 log-probs [R] from logits [R, V].

    Row r draws with the seed of its slot at that slot's place plus `add`. Temperature 0 is greedy, with the log-probs of
    temperature 1.
    """
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    total = torch.empty_like(best)
    inverse = 1.0 if temperature == 0 else 1.0 / temperature
    _chunks[(rows, chunks)](logits, best, total, inverse, vocabulary, chunks, CHUNK=CHUNK, num_warps=4)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _pick[(rows,)](
        logits, best, total, slots, seeds, places, tokens, logprobs, inverse, vocabulary, chunks, add,
        CHUNKS_PAD=triton.next_power_of_2(chunks), CHUNK=CHUNK, GREEDY=temperature == 0, num_warps=4,
    )  # fmt: skip
    return tokens, logprobs
