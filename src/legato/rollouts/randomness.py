"""Counter-based random numbers: each depends only on the seed of its rollout and the position of its token.

So a rollout does not depend on its batch, on the order of work or on earlier samples, and a resumed run draws the same
numbers as an uninterrupted one. The generator is splitmix64: a counter times an odd constant, then two rounds of
xor-shift-multiply.
"""

import hashlib

import torch
from torch import Tensor


def seed_of(*words: object) -> int:
    """63 bits from anything printable: H(run seed, problem, visit, sample, ...)."""
    text = "\x1f".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _to_signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


# Products of 64-bit integers wrap around, as the generator requires.
_STEP, _FIRST, _SECOND = (_to_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right of a signed integer."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, place: int | Tensor) -> Tensor:
    """Numbers in [0, 1), float64, one per seed, for the token at `place`; both are broadcast."""
    counter = torch.as_tensor(place, dtype=torch.int64, device=seeds.device) + 1
    state = seeds + counter * _STEP
    state = (state ^ _shift(state, 30)) * _FIRST
    state = (state ^ _shift(state, 27)) * _SECOND
    state = state ^ _shift(state, 31)
    return _shift(state, 11).to(torch.float64) * 2.0**-53
