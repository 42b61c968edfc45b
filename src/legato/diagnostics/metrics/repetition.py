"""How much responses repeat themselves."""

import torch
from torch import Tensor

LENGTH = 4
"""Number of tokens in a run that counts as repeated."""
SHORTEST = 2 * LENGTH
"""Shorter responses do not count: they have no room for a loop."""

_FACTOR = 1_000_003
"""Runs are compared by a hash modulo 2^64; two that differ and collide would need a response of billions of tokens."""


def repetition(tokens: Tensor, lengths: Tensor) -> float:
    """Mean over responses of at least `SHORTEST` tokens of: runs of `LENGTH` tokens that occurred before / runs.

    tokens [B, T] padded at the end, lengths [B]; on the host. NaN if no response is long enough.
    """
    long = lengths >= SHORTEST
    if not bool(long.any()):
        return float("nan")
    tokens, lengths = tokens[long].to(torch.int64), lengths[long]
    runs = tokens.shape[1] - LENGTH + 1
    hashed = torch.zeros_like(tokens[:, :runs])
    for place in range(LENGTH):
        hashed = hashed * _FACTOR + tokens[:, place : place + runs] + 1
    counts = lengths - LENGTH + 1
    outside = torch.arange(runs) >= counts[:, None]
    # Padding sorts to the end, each position with a number of its own.
    hashed = torch.where(outside, torch.iinfo(torch.int64).max - torch.arange(runs), hashed)
    ordered = hashed.sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]).sum(1)
    return float((again / counts).mean())
