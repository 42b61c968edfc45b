"""An engine whose responses come from one server, for `legato sample` and `legato eval`. It cannot train.

Every seed is a request of its own, sent by a few threads. A request that fails for want of an answer is sent again, a few
times: the same seed gives the same response, so a response that was sampled twice is still one.
"""

import itertools
import queue
import random
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from legato.errors import InputError
from legato.rollouts.engine import Capabilities, Finished, Handle, Job, JobEngine, Limits, Request, Response
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers.backoff import JITTER, ask_until_taken, seconds_to_wait
from legato.rollouts.servers.dialect import PATH, Ask, read_reply, version_number
from legato.rollouts.servers.errors import BusyError, ServerError, UnreachableError
from legato.rollouts.servers.http import HttpClient

ATTEMPTS = 5
"""How often a request is sent before the engine gives up."""
THREADS = 64
"""Requests in flight at once."""
REQUEST_SECONDS = 600.0
"""How long a server may take for one response, waiting in its queue included."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What a server says of its model."""

    name: str
    context_tokens: int | None
    vocabulary: int | None
    """None: it does not say (vLLM)."""
    version: str | None
    adapters: bool = False
    """Whether it takes the adapters of LoRA instead of whole weights."""


def ask_model(client: HttpClient, seconds: float = 30.0) -> ServerModel:
    """The model of a server; ServerError if there is none."""
    reply = client.get("/v1/models", seconds=seconds)
    cards = reply.get("data")
    if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict) or not isinstance(cards[0].get("id"), str):
        raise InputError(f"expected a server with a model, got {str(reply)[:200]} ({client.url})")
    card = cards[0]
    sizes = [card.get(name) if isinstance(card.get(name), int) else None for name in ("max_model_len", "vocabulary")]
    version = card.get("weight_version")
    name = version if isinstance(version, str) else None
    return ServerModel(card["id"], sizes[0], sizes[1], name, card.get("adapters") is True)


class ServerEngine(JobEngine):
    """Samples at a server. Threads start with the first request and end with the process."""

    name = "server"
    capabilities = Capabilities(logprobs_at_temperature=True)

    def __init__(
        self,
        client: HttpClient,
        tokenizer: Any,
        vocabulary: int,
        *,
        threads: int = THREADS,
        seconds: float = REQUEST_SECONDS,
    ) -> None:
        super().__init__()
        self.client, self.tokenizer, self.vocabulary, self.seconds = client, tokenizer, vocabulary, seconds
        self.retries = 0
        """How many requests were sent again so far."""
        self.weights: set[str] = set()
        """The server's names of the weights that the tokens of all responses were sampled from."""
        self._threads = threads
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Handle, int, Response | Exception]] = queue.SimpleQueue()
        self._started = 0
        self._closed = threading.Event()
        self._jitter = random.Random()  # the global generator belongs to the run

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        handles = super().submit(requests, sampling, limits)
        for handle in handles:
            job = self.jobs[handle]
            for place in range(len(job.request.seeds)):
                self._asked.put(lambda job=job, place=place: self._sample(job, place))  # type: ignore[misc]
                self._start_thread()
        return handles

    def poll(self) -> list[Finished]:
        while self.jobs:
            if finished := self.report_complete():
                return finished
            handle, place, answer = self._answers.get()
            if handle not in self.jobs:
                continue  # cancelled
            if isinstance(answer, ServerError):
                raise InputError(f"expected a response of the server {self.client.url}, got {answer} (--server)")
            if isinstance(answer, Exception):
                raise answer
            self.jobs[handle].responses[place] = answer
        return []

    def close(self) -> None:
        """End the threads and their requests. Outstanding requests have no response, and no later one is sent."""
        self._closed.set()
        self.jobs.clear()
        for _ in range(self._started):
            self._asked.put(None)
        self.client.close()

    def _start_thread(self) -> None:
        if self._started < self._threads:
            self._started += 1
            threading.Thread(target=self._work, name=f"server-{self._started}", daemon=True).start()

    def _work(self) -> None:
        while (task := self._asked.get()) is not None:
            task()

    def _sample(self, job: Job, place: int) -> None:
        if job.handle not in self.jobs:
            return
        ask = Ask(
            prompt=job.request.prompt.tolist(),
            seed=job.request.seeds[place],
            sampling=job.sampling,
            limits=job.limits,
            name=uuid.uuid4().hex,
        )
        try:
            answer: Response | Exception = self._ask(ask)
        except Exception as error:  # raised by `poll`
            answer = error
        self._answers.put((job.handle, place, answer))

    def _ask(self, ask: Ask) -> Response:
        """The response, after as many attempts as it takes; ServerError after the last. A busy server has not failed."""

        def post() -> Response:
            names: list[str] = []

            def read_version(name: Any) -> int:
                names.append(str(name))
                return version_number(name)

            reply = self.client.post(PATH, ask.body(), seconds=self.seconds)
            response = read_reply(reply, ask, self.tokenizer, self.vocabulary, read_version)
            self.weights.update(names)
            return response

        for attempt in itertools.count(1):
            try:
                return ask_until_taken(post, self.seconds, self._pause)
            except BusyError:
                raise
            except ServerError as error:
                if not error.retry or attempt == ATTEMPTS:
                    raise
                wait = seconds_to_wait(error, attempt)
            self._pause(wait)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, seconds: float) -> None:
        """Wait before a request is sent again; UnreachableError once the engine is closed: nobody waits for the response."""
        if self._closed.wait(seconds * self._jitter.uniform(*JITTER)):
            raise UnreachableError("the engine was closed")
        self.retries += 1
