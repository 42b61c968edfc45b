"""Sampled and scored groups as tensors, for checkpoints and for the journal of a run that samples ahead.

A saved group is a handful of tensors; one of them holds JSON as bytes. It names the number of the problem in the run and a
fingerprint of what was asked, so that a group is used only for the very request that it answers.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.rollouts.engine import Limits
from legato.rollouts.episodes import Start
from legato.rollouts.sampling import Sampling
from legato.training.ranks.exchange import ScoredRollout, read_rollout, write_rollout

_RECORD = "record"


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """The scored rollouts of one start, as they are stored."""

    record: Mapping[str, Any]
    """{"number", "fingerprint", "rollouts"}"""
    held: Sequence[Tensor]

    @classmethod
    def of(cls, number: int, start: Start, fingerprint: str, rows: Sequence[ScoredRollout]) -> "SavedGroup":
        held: list[Tensor] = []
        rollouts = [write_rollout(pair, start, held) for pair in rows]
        return cls({"number": number, "fingerprint": fingerprint, "rollouts": rollouts}, held)

    @property
    def number(self) -> int:
        return int(self.record["number"])

    def rows(self, start: Start, fingerprint: str) -> list[ScoredRollout] | None:
        """The scored rollouts; None if they answer another request than this one."""
        if self.record["fingerprint"] != fingerprint or len(self.record["rollouts"]) != len(start.seeds):
            return None
        rest = iter(self.held)
        return [read_rollout(record, start, rest) for record in self.record["rollouts"]]

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """What `read` reads. Every tensor is a copy: safetensors refuses tensors that share memory."""
        text = torch.frombuffer(bytearray(json.dumps(self.record).encode()), dtype=torch.uint8)
        copies = {f"{prefix}{place:06d}": _copy(tensor) for place, tensor in enumerate(self.held)}
        return {f"{prefix}{_RECORD}": text, **copies}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> "SavedGroup":
        """A group from the tensors that `tensors` returned, without the prefix."""
        record = json.loads(bytes(tensors[_RECORD].tolist()))
        return cls(record, [tensors[name] for name in sorted(tensors) if name != _RECORD])


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def pack_groups(groups: Iterable[SavedGroup], prefix: str) -> dict[str, Tensor]:
    """The tensors of some groups, by number, under names that begin with the prefix."""
    return {name: each for group in groups for name, each in group.tensors(f"{prefix}{group.number}/").items()}


def unpack_groups(tensors: Mapping[str, Tensor], prefix: str) -> dict[int, SavedGroup]:
    """The groups that `pack_groups` packed, by number."""
    by_number: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition("/")
            by_number.setdefault(int(number), {})[rest] = tensor
    return {number: SavedGroup.read(each) for number, each in by_number.items()}


def fingerprint_of(start: Start, sampling: Sampling, limits: Limits) -> str:
    """A hash of everything that is asked of the sampler and the reward for one start."""
    problem = start.problem
    facts = [problem.key, problem.answer, list(start.seeds), list(start.ids), repr(sampling), repr(limits)]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    digest.update(start.prompt.to(torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()
