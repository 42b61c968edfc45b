"""What an engine is: prompts with seeds in, sampled tokens out, in the order asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from legato.core.rollout import Routes, StopReason
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

    def before_stop(self, text: str) -> str | None:
        """The text before the first stop string in it; None where there is none."""
        cuts = [text.find(stop) for stop in self.stop_strings if stop in text]
        return text[: min(cuts)] if cuts else None


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
    routes: Routes | None = None
    """Of prompt and response without the last token, where the engine records them."""


def written(
    tokenizer: Any,
    tokens: Tensor,
    logprobs: Tensor,
    kept: Tensor | None,
    lengths: Sequence[int],
    stops: Sequence[StopReason],
    cut: Mapping[int, str],
) -> list[Response]:
    """Tables [rows, T] as responses. `cut` holds the texts that a stop string ended; the others are decoded here."""
    tokens, logprobs, kept = tokens.cpu(), logprobs.cpu(), None if kept is None else kept.cpu()
    said = [tokens[row, : length - (stops[row] is StopReason.END_TOKEN)].tolist() for row, length in enumerate(lengths)]
    texts = tokenizer.batch_decode(said, skip_special_tokens=True)
    return [
        Response(
            tokens=tokens[row, :length].clone(),
            logprobs=logprobs[row, :length].clone(),
            kept_logmass=None if kept is None else kept[row, :length].clone(),
            text=cut.get(row, texts[row]),
            stop=stops[row],
        )
        for row, length in enumerate(lengths)
    ]


@runtime_checkable
class Engine(Protocol):
    """A source of responses."""

    name: str

    def generate(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[list[Response]]:
        """For each request its responses, in the order of its seeds."""


@runtime_checkable
class Remembering(Protocol):
    """An engine that samples from more than the weights of now."""

    @property
    def settled(self) -> bool:
        """Whether it has seen enough to be what it is going to be."""

    def before_update(self) -> None:
        """The weights are about to change."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""
