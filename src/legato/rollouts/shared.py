"""One engine for several threads: a thread that samples ahead, and the main thread that publishes weights and evaluates.

A client is a set of requests with a poll of its own. Only one thread works on the engine at a time, in the order in which
they came, so that a publish does not wait behind a thread that polls again and again. What a poll reports is handed to the
client whose request it was. An engine that says `concurrent` takes requests and weights while another thread polls it.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from legato.rollouts.engine import Capabilities, Engine, EnginePlace, Finished, Handle, Limits, Progress, Request, Response
from legato.rollouts.sampling import Sampling


class TurnLock:
    """A lock that is given to threads in the order in which they asked for it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        ticket = object()
        with self._condition:
            self._queue.append(ticket)
        try:
            with self._condition:
                while self._queue[0] is not ticket:
                    self._condition.wait()
            yield
        finally:
            with self._condition:
                self._queue.remove(ticket)
                self._condition.notify_all()


class SharedEngine:
    """Shares an engine among clients, each of which belongs to one thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._turn = TurnLock()
        self._news = threading.Condition()
        """Guards everything below."""
        self._owners: dict[Handle, Client] = {}
        self._early: list[Finished] = []
        """Requests that were complete before `submit` had returned."""
        self._responses: dict[Handle, dict[int, Response]] = {}
        """The responses so far of requests that `decode_briefly` reports one by one."""
        self._sizes: dict[Handle, int] = {}
        self._polled = False
        """Whether a thread polls at the moment."""

    def client(self) -> "Client":
        """A client: an engine whose requests are its own."""
        return Client(self)

    @contextmanager
    def _engine_held(self) -> Iterator[None]:
        """The engine, to submit, cancel or publish."""
        if self.engine.capabilities.concurrent:
            yield
        else:
            with self._turn.held():
                yield

    def submit(self, client: "Client", requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        with self._engine_held():
            handles = self.engine.submit(requests, sampling, limits)
            with self._news:
                self._owners |= dict.fromkeys(handles, client)
                self._sizes |= {handle: len(each.seeds) for handle, each in zip(handles, requests, strict=True)}
                early, self._early = self._early, []
                self._hand_out(early)
        return handles

    def cancel(self, handle: Handle) -> None:
        with self._engine_held():
            self.engine.cancel(handle)
        with self._news:
            for table in (self._owners, self._responses, self._sizes):
                table.pop(handle, None)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._engine_held():
            self.engine.publish(weights, version)

    def poll(self, client: "Client") -> list[Finished]:
        """The complete requests of a client, at least one; [] only if it has none outstanding."""
        while True:
            with self._news:
                while not client.finished and self._polled and client in self._owners.values():
                    self._news.wait()
                if client.finished:
                    finished, client.finished = client.finished, []
                    return finished
                if client not in self._owners.values():
                    return []
                self._polled = True
            try:
                finished = self._work()
            finally:
                with self._news:
                    self._polled = False
                    self._news.notify_all()
            with self._news:
                self._hand_out(finished)

    def _work(self) -> list[Finished]:
        """Poll the engine once; [] if it decodes in short pieces and no request became complete."""
        can = self.engine.capabilities
        if can.concurrent:
            return self.engine.poll()
        with self._turn.held():
            if not can.partial:
                return self.engine.poll()
            progress = self.engine.decode_briefly()
        finished = []
        with self._news:
            for ended in progress.ended:
                if ended.handle not in self._sizes:
                    continue  # cancelled meanwhile
                responses = self._responses.setdefault(ended.handle, {})
                responses[ended.place] = ended.response
                if len(responses) == self._sizes[ended.handle]:
                    in_order = [responses[place] for place in range(len(responses))]
                    finished.append(Finished(handle=ended.handle, responses=in_order))
        return finished

    def _hand_out(self, finished: Sequence[Finished]) -> None:
        for each in finished:
            owner = self._owners.pop(each.handle, None)
            if owner is None:
                self._early.append(each)
                continue
            self._responses.pop(each.handle, None)
            self._sizes.pop(each.handle, None)
            owner.finished.append(each)
        if finished:
            self._news.notify_all()


class Client(Engine):
    """The engine as one of its clients sees it."""

    def __init__(self, shared: SharedEngine) -> None:
        self.shared = shared
        self.name = shared.engine.name
        self.finished: list[Finished] = []
        """Complete requests of this client that it has not polled yet."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return self.shared.engine.capabilities

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.shared.engine.version

    @property
    def innermost(self) -> Engine:
        return self.shared.engine

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        return self.shared.submit(self, requests, sampling, limits)

    def poll(self) -> list[Finished]:
        return self.shared.poll(self)

    def cancel(self, handle: Handle) -> None:
        self.shared.cancel(handle)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.shared.publish(weights, version)

    def decode_briefly(self, watched: Collection[Handle] = ()) -> Progress:
        raise RuntimeError("a shared engine is polled, not decoded in pieces")

    def reserve(self, prompt_tokens: int, response_tokens: int) -> None:
        self.shared.engine.reserve(prompt_tokens, response_tokens)

    @property
    def settled(self) -> bool:
        return self.shared.engine.settled

    def before_update(self) -> None:
        self.shared.engine.before_update()

    def open(self, place: EnginePlace) -> None:
        self.shared.engine.open(place)

    def close(self) -> None:
        self.shared.engine.close()

    def metrics(self) -> dict[str, float]:
        return self.shared.engine.metrics()

    def state(self) -> dict[str, Tensor]:
        return self.shared.engine.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.shared.engine.load(state)
