"""What a fleet needs of a server, whatever its words are."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.errors import InputError
from legato.rollouts.engine import Response
from legato.rollouts.servers.dialect import Ask
from legato.rollouts.servers.errors import BadReplyError
from legato.rollouts.servers.http import HttpClient

CHECK_SECONDS = 10.0
"""How long a server may take to say that it is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself. None: it does not say."""

    software: str
    """Name and version, as for a message."""
    model: str
    context_tokens: int | None = None
    vocabulary: int | None = None
    adapters: bool = False
    """Whether it takes the adapters of LoRA instead of whole weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """What a start command needs."""

    python: str
    model: Path
    port: int
    key: str
    dtype: str
    context_tokens: int
    sequences: int
    """Responses that the run asks of one server at once."""
    lora_rank: int
    """0: no adapters are published."""
    device: str
    """"cpu" or "cuda": where the policy is trained."""
    arguments: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is needed to read a reply."""

    tokenizer: Any
    vocabulary: int
    version_of: Callable[[Any], int]
    """The policy version that a server's name of its weights stands for; UNKNOWN_VERSION: none of this run."""


class Dialect:
    """One kind of server. Methods block and may be called from any thread; they raise `ServerError`s."""

    name: str = "server"
    option: str = ""
    """How a user starts such a server so that a run can use it, for messages."""
    truncation: bool = False
    """Whether replies say how much probability top-p, top-k and min-p kept."""
    reads_untied: bool = True
    """Whether a tied output layer is written as a matrix of its own: some servers do not reload it otherwise."""

    def facts(self, client: HttpClient, seconds: float) -> ServerFacts:
        """What the server says of itself; InputError if it is no server of this kind or too old."""
        raise NotImplementedError

    def check_ready(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> None:
        """ServerError unless the server has started and can sample. One that is paused may not answer."""
        client.tell("GET", "/health", seconds=seconds)

    def check_alive(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> None:
        """ServerError unless the server answers, also while it is paused."""
        self.check_ready(client, seconds)

    def weights_name(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> str | None:
        """The server's name of the weights that sample now."""
        raise NotImplementedError

    def sample(self, client: HttpClient, ask: Ask, reading: Reading, seconds: float) -> Response:
        """One response."""
        raise NotImplementedError

    def score(self, client: HttpClient, tokens: Sequence[int], name: str, seconds: float) -> list[float]:
        """Log-probs at temperature 1 of all tokens of a text but the first."""
        raise NotImplementedError

    def load(self, client: HttpClient, folder: Path, name: str, *, adapters: bool, seconds: float) -> None:
        """Make the server sample from the weights of a folder, under a name. Requests in flight go on with them."""
        raise NotImplementedError

    def resume(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> None:
        """Let a server go on that a load has paused; nothing happens to one that is not paused."""
        raise NotImplementedError

    def rename(self, client: HttpClient, name: str, seconds: float) -> None:
        """Name the weights that sample now."""
        raise NotImplementedError

    def command(self, plan: StartPlan) -> tuple[list[str], Mapping[str, str]]:
        """The words that start a server on loopback, and what is added to its environment."""
        raise NotImplementedError


def read_scores(values: Sequence[Any], expected: int) -> list[float]:
    """Log-probs of a text, checked."""
    if len(values) != expected:
        raise BadReplyError(f"expected {expected} log-probs of the text, got {len(values)}")
    scores = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadReplyError(f"expected a log-prob, got {value!r}")
        scores.append(float(value))
    return scores


def check_version(kind: str, url: str, version: Any, lowest: tuple[int, ...]) -> str:
    """The version of a server's software; InputError if it is older than `lowest`."""
    text = str(version)
    numbers = []
    for part in text.lstrip("v").split(".")[: len(lowest)]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits) if digits else -1)
    if tuple(numbers) < lowest:
        wanted = ".".join(map(str, lowest))
        raise InputError(f"expected {kind} {wanted} or later at {url}, got version {text!r} (rollouts.servers); update it")
    return text
