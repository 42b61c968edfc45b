"""Comparisons that keep ranks equal: what they start with, and the tables and choices of every step."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.core.world import World
from legato.errors import InputError

_MOST_NAMED = 5


class RanksDifferError(RuntimeError):
    """Ranks whose tables or choices have come apart in the middle of a run."""


def require_same(world: World, facts: Mapping[str, Any]) -> None:
    """InputError that names what differs, unless all ranks have the same facts."""
    differing = _differences(world, facts)
    if differing:
        listed = "; ".join(f"{name}: {words}" for name, words in differing[:_MOST_NAMED])
        more = f"; and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
        raise InputError(
            f"expected ranks that start with the same code, options, data and weights, got ranks that differ in {listed}"
            f"{more}; give every machine the same files and versions"
        )


def check_step(world: World, step: int, facts: Mapping[str, Any]) -> None:
    """RanksDifferError that names what differs, unless all ranks have the same facts of a step."""
    if world.size == 1:
        return
    differing = _differences(world, facts)
    if differing:
        listed = "; ".join(f"{name} ({words})" for name, words in differing)
        raise RanksDifferError(f"the ranks have come apart in step {step + 1}: they differ in {listed}")


def _differences(world: World, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What differs, with the values of rank 0 and of the first rank that has another one."""
    gathered = world.gather(dict(facts))
    differing = []
    for name in sorted({name for each in gathered for name in each}):
        first = gathered[0].get(name)
        other = next((rank for rank, each in enumerate(gathered) if each.get(name) != first), None)
        if other is not None:
            differing.append((name, f"rank 0 has {first!r:.60}, rank {other} {gathered[other].get(name)!r:.60}"))
    return differing


def digest(*tensors: Tensor | None) -> str:
    """A hash of the exact bytes of some tensors."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if tensor is None:
            hashed.update(b"none")
            continue
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().reshape(-1)
        hashed.update(flat.new_empty(flat.shape).copy_(flat).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def code_digest() -> str:
    """A hash of the source files of this package."""
    root = Path(__file__).parents[2]
    hashed = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        hashed.update(str(path.relative_to(root)).encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()
