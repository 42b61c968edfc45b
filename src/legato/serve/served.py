"""What a server serves: a policy with its engine, and how much of it clients may use."""

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from legato.policy.policy import Policy
from legato.rollouts.engine import Engine
from legato.rollouts.render import Rendering
from legato.rollouts.scoring import TOKENS_AT_ONCE, TextScores, score_texts
from legato.rollouts.tool_calls import Turn
from legato.serve.engine_thread import EngineThread
from legato.serve.errors import ApiError
from legato.serve.limits import ServeLimits
from legato.serve.prompts import Prompts
from legato.serve.recording import Recording
from legato.serve.weights import Weights

_Result = TypeVar("_Result")

CHARACTERS_PER_TOKEN = 64
"""A text of more characters for each token of the context does not fit, whatever the tokenizer."""


@dataclass(slots=True)
class Admission:
    """Counts the responses in flight over all clients and refuses more than `most`."""

    most: int
    taken: int = 0
    refused: int = 0
    """How many requests were refused so far."""

    def take(self, sequences: int) -> None:
        """Count responses in; ApiError if there are too many: 429, or 400 if an idle server would not take them either."""
        if sequences > self.most:
            self.refused += 1
            raise ApiError(
                400,
                f"expected at most {self.most} responses of one request (prompts times n), got {sequences} (n); divide the"
                " request, or start the server with a larger --max-requests",
                param="n",
            )
        if self.taken + sequences > self.most:
            self.refused += 1
            raise ApiError(
                429,
                f"this server has {self.taken} responses in flight and takes at most {self.most}: send fewer requests at"
                " once, or send this one again later",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        self.taken += sequences

    def give_back(self, sequences: int) -> None:
        self.taken -= sequences


class Served:
    """A policy and its engine behind a server. Constructed before the event loop runs; `start` connects it."""

    def __init__(
        self,
        *,
        name: str,
        policy: Policy,
        engine: Engine,
        rendering: Rendering,
        end_tokens: Sequence[int],
        limits: ServeLimits,
        weights: Weights,
        software: str,
    ) -> None:
        """`software` is the version of Legato."""
        self.name, self.policy, self.limits, self.weights = name, policy, limits, weights
        self.created, self.software = int(time.time()), software
        self.end_tokens = tuple(end_tokens)
        self.vocabulary = policy.vocabulary
        self.thread = EngineThread(engine)
        self.admission = Admission(limits.sequences)
        self.prompts = Prompts(rendering)
        # Decoding happens in the event loop, beside the thread that encodes and the thread of the engine.
        self.tokenizer: Any = copy.deepcopy(policy.tokenizer)
        self._reading = replace(rendering, tokenizer=self.tokenizer)
        self.recording: Recording | None = None
        """The episode whose requests these are; None: requests of any client, which nobody records."""
        self._texts = ThreadPoolExecutor(1, "texts")
        self._files = ThreadPoolExecutor(1, "files")

    def recorded_by(self, recording: Recording) -> "Served":
        """The same server for the requests of one episode."""
        view = copy.copy(self)
        view.recording = recording
        return view

    def start(self) -> None:
        """Start the engine's thread; called in the event loop that will serve."""
        self.thread.start(asyncio.get_running_loop())

    def stop(self) -> None:
        """End the threads."""
        self.thread.stop()
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._files.shutdown(wait=False, cancel_futures=True)

    def read_turn(self, tokens: Sequence[int], text: str, *, by_text: bool) -> Turn:
        """A response as its chat template means it: text, reasoning and calls. `by_text`: a stop string cut its tokens."""
        if by_text:
            return self._reading.tool_calls.read(text)
        ended = bool(tokens) and tokens[-1] in self.end_tokens
        return self._reading.read_turn(torch.tensor(tokens), text, ended=ended)

    @property
    def has_channels(self) -> bool:
        """Whether the answer is one of several channels of a response (gpt-oss), which its whole text runs together."""
        return self._reading.tool_calls.name == "harmony"

    def check_length(self, text: str, param: str) -> None:
        """ApiError for a text that is far too long: encoding a book to refuse it would take seconds."""
        if len(text) > CHARACTERS_PER_TOKEN * self.limits.context_tokens:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.limits.context_tokens} tokens, got a text of {len(text)}"
                f" characters ({param}); shorten it",
                param=param,
                code="context_length_exceeded",
            )

    async def encode(self, function: Callable[[Prompts], _Result]) -> _Result:
        """Run a function of prompts in the one thread that encodes."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, function, self.prompts)

    async def read_files(self, function: Callable[[], _Result]) -> _Result:
        """Run a function that reads files while the engine goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._files, function)

    async def score(
        self, texts: Sequence[Sequence[int]], temperature: float = 1.0, count: int = 0, *, param: str
    ) -> list[tuple[int, TextScores]]:
        """For each text the engine's version and its scores under that; ApiError if the texts have too many tokens.

        A forward pass at a time: responses of other clients go on in between.
        """
        tokens = sum(map(len, texts))
        if tokens > self.limits.scored_tokens:
            raise ApiError(
                400,
                f"expected at most {self.limits.scored_tokens} tokens to score in a request, got {tokens} ({param}); send"
                " fewer prompts at once",
                param=param,
            )
        scored: list[tuple[int, TextScores]] = []
        for batch in _batches([torch.tensor(text) for text in texts]):

            def score(batch: list[Tensor] = batch) -> list[tuple[int, TextScores]]:
                scores = score_texts(self.policy, batch, [temperature] * len(batch), count)
                return [(self.thread.engine.version, each) for each in scores]

            scored += await self.thread.run(score)
        return scored


def _batches(texts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The texts in order, as many together as one forward pass holds."""
    batch: list[Tensor] = []
    for text in texts:
        if batch and sum(map(len, batch)) + len(text) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
