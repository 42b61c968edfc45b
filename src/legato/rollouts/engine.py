"""What an engine is: prompts with seeds in, sampled tokens out, in the order asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from legato.core.rollout import StopReason
from legato.rollouts.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and the seeds of the responses wanted: as many responses as seeds."""

    prompt: Tensor
    """[P] token ids, at least one."""
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a response ends."""

    max_response_tokens: int
    end_tokens: tuple[int, ...]
    """Written and counted: the policy chose to stop."""
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """[T] each; T is at least 1."""

    tokens: Tensor
    logprobs: Tensor
    """float32, of softmax(z / temperature) before truncation."""
    kept_logmass: Tensor | None
    text: str
    """Without end tokens and without the stop string."""
    stop: StopReason


@runtime_checkable
class Engine(Protocol):
    """A source of responses."""

    name: str

    def generate(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        """For each request its responses, in the order of its seeds."""
