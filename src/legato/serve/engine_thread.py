"""The thread that owns the engine. HTTP handlers hand it work and wait; it decodes for all of them together.

    work = Work(request=..., sampling=..., limits=..., watched=True, deliver=queue.put_nowait)
    thread.submit(work)            new tokens and ended responses are delivered in the event loop
    thread.cancel(work)            the client is gone: the engine forgets the request
    await thread.run(function)     anything else that needs the device: scoring, new weights

No other thread touches the engine or the policy while the server runs.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from legato.errors import describe_error
from legato.rollouts.engine import Engine, Handle, Limits, Progress, Request, Response
from legato.rollouts.sampling import Sampling

_Result = TypeVar("_Result")

REPORT_SECONDS = 0.02
"""The least time between two deliveries of new tokens: a delivery costs as much for one token as for ten."""
REPORT_SHARE = 0.25
"""The share of the event loop's time that deliveries of new tokens may take. Writing to 256 streams takes 50 ms, in which
answers, new requests and the engine's own thread wait."""
SLOWEST_REPORT = 1.0
"""The most seconds between two deliveries."""
DELIVERED_TOGETHER = 16
"""How many events are delivered before the first of them is answered."""
ROUNDS_OF_AN_ANSWER = 6
"""Rounds of the event loop from the delivery of a whole response to its answer."""
SHUTTING_DOWN = "the server is shutting down"
MODES = ("abort", "wait", "keep")
"""What a pause does with requests in flight, in vLLM's words: give them up, wait for them, or hold them until the resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Tokens of a response that is still being decoded."""

    place: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """A whole response."""

    place: int
    response: Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The server gave up on the responses of a request that had not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The engine raised; the request has no response."""

    reason: str


Event = NewTokens | Complete | Aborted | Failed


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A request of a client to the engine."""

    request: Request
    sampling: Sampling
    limits: Limits
    watched: bool
    """Whether tokens are delivered before a response has ended."""
    deliver: Callable[[Event], None]
    """Called in the event loop."""
    name: str = ""
    """The request id of the client."""
    handle: Handle | None = None
    """Of the engine; None: it has not been submitted yet."""
    ended: set[int] = field(default_factory=set)
    """The places whose responses have ended."""

    @property
    def sequences(self) -> int:
        return len(self.request.seeds)


class EngineThread:
    """Runs an engine for many clients. All methods but `start` may be called from the event loop at any time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # To look whether weights have changed, several kernels are launched for each of them, whenever a request finds the
        # engine idle. Where many clients end together, handlers write answers at that moment, and every launch waits.
        engine.innermost.weights_are_published = True
        self.fault: str | None = None
        """Why the thread has ended; None while it runs."""
        self.failure: str | None = None
        """Why the last round of decoding failed; None if it did not."""
        self.mode: str = "running"
        """running, draining (a pause waits for requests in flight) or paused"""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outstanding: dict[Handle, Work] = {}
        self._held: dict[int, Work] = {}
        """Work that arrived during a pause, by identity, in order of arrival."""
        self._drained: list[Future[None]] = []
        self._next_report = 0.0
        """When tokens of responses that still decode are delivered next."""
        self._reporting = False
        """Whether the event loop has not written the last of them yet."""
        self._undelivered: deque[tuple[Work, Event]] = deque()
        """Events in the order in which the engine sent them."""
        self._undelivered_tokens = 0
        """How many of them are `NewTokens`."""
        self._report_began = 0.0
        """When the last new tokens reached the event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # Called from the event loop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events are delivered in this loop."""
        self._loop = loop
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> None:
        """End the thread after what it does now, and wait for it."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def running(self) -> int:
        """How many requests the engine holds."""
        return len(self._outstanding)

    @property
    def waiting(self) -> int:
        """How many requests are held until the server resumes."""
        return len(self._held)

    def submit(self, work: Work) -> None:
        """Hand a request over. What becomes of it is delivered."""
        if self.fault is not None:
            work.deliver(Failed(reason=self.fault))
        else:
            self._commands.put(lambda: self._submit(work))

    def cancel(self, work: Work) -> None:
        """Give up on a request without a word to its client. A request that has ended is ignored."""
        self._commands.put(lambda: self._forget(work))

    async def run(self, function: Callable[[], _Result]) -> _Result:
        """Call a function on the engine's thread, between two rounds of decoding, and return its result."""
        if self.fault is not None:
            raise RuntimeError(self.fault)
        future: Future[_Result] = Future()
        self._commands.put(lambda: _settle(future, function))
        return await asyncio.wrap_future(future)

    async def pause(self, mode: str) -> None:
        """Stop decoding; returns when it has stopped. Requests that arrive meanwhile wait for `resume`."""
        drained: Future[None] = Future()
        await self.run(lambda: self._pause(mode, drained))
        await asyncio.wrap_future(drained)

    async def resume(self) -> None:
        """Go on decoding."""
        await self.run(self._resume)

    async def abort(self, names: Iterable[str]) -> int:
        """Abort the requests with these ids, or all if there are none; returns how many were in flight."""
        chosen = set(names)
        return await self.run(lambda: self._abort(chosen))

    async def end_requests(self) -> None:
        """Answer the requests in flight, and later ones, with the error that the server is shutting down."""
        await self.run(self._end_requests)

    # In the event loop

    def _deliver(self, events: list[tuple[Work, Event]]) -> None:
        idle = not self._undelivered
        self._undelivered.extend(events)
        if new := sum(isinstance(event, NewTokens) for _, event in events):
            self._undelivered_tokens += new
            self._report_began = time.monotonic()
        if idle:
            self._deliver_some()

    def _deliver_some(self) -> None:
        """Deliver the next few events, and the others once those have been answered."""
        had_tokens = self._undelivered_tokens > 0
        for _ in range(min(DELIVERED_TOGETHER, len(self._undelivered))):
            work, event = self._undelivered.popleft()
            self._undelivered_tokens -= isinstance(event, NewTokens)
            work.deliver(event)
        if had_tokens and not self._undelivered_tokens:
            # Handlers are woken by the next round of the loop and write in the one after it. Whole responses of other
            # requests may go on coming for as long as clients ask for more.
            self._after_rounds(1, self._end_report)
        if self._undelivered:
            self._after_rounds(ROUNDS_OF_AN_ANSWER, self._deliver_some)

    def _after_rounds(self, rounds: int, function: Callable[[], None]) -> None:
        assert self._loop is not None
        if rounds:
            self._loop.call_soon(self._after_rounds, rounds - 1, function)
        else:
            function()

    def _end_report(self) -> None:
        now = time.monotonic()
        self._next_report = max(self._next_report, now + pause_after_report(now - self._report_began))
        self._reporting = False

    # On the engine's thread

    def _main(self) -> None:
        try:
            while self._run_commands():
                if self._outstanding and self.mode != "paused":
                    self._decode()
        except BaseException as error:
            self.fault = f"the engine has stopped: {describe_error(error)}"
            self._fail_all(self.fault)
            raise
        finally:
            self._refuse_commands()

    def _run_commands(self) -> bool:
        """Run what is queued; if there is nothing to decode, wait for it. Returns False to end the thread."""
        idle = not self._outstanding or self.mode == "paused"
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            idle = False

    def _refuse_commands(self) -> None:
        """Answer what was queued when the thread ended, and the pauses that wait."""
        self.fault = self.fault or SHUTTING_DOWN
        self._fail_all(self.fault)
        for future in self._drained:
            _answer(future)
        while True:
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                return
            if command is not None:
                command()

    def _submit(self, work: Work) -> None:
        if self.fault is not None:
            self._send([(work, Failed(reason=self.fault))])
        elif self.mode != "running":
            self._held[id(work)] = work
        else:
            try:
                (work.handle,) = self.engine.submit([work.request], work.sampling, work.limits)
            except Exception as error:
                self._send([(work, Failed(reason=f"the engine did not take the request: {describe_error(error)}"))])
                return
            self._outstanding[work.handle] = work

    def _forget(self, work: Work) -> None:
        self._held.pop(id(work), None)
        if work.handle is not None and self._outstanding.pop(work.handle, None) is not None:
            self.engine.cancel(work.handle)
            self._finish_draining()

    def _decode(self) -> None:
        watched: set[Handle] = set()
        if time.monotonic() >= self._next_report and not self._reporting:
            watched = {handle for handle, work in self._outstanding.items() if work.watched}
            self._next_report = time.monotonic() + REPORT_SECONDS
        try:
            progress = self.engine.decode_briefly(watched)
        except Exception as error:
            # Whatever the engine raised, its requests have no response. The next ones may have.
            self.failure = f"the engine failed: {describe_error(error)}"
            self._fail_all(self.failure)
            return
        self.failure = None
        self._send(self._events(progress))
        self._finish_draining()

    def _events(self, progress: Progress) -> list[tuple[Work, Event]]:
        events: list[tuple[Work, Event]] = []
        for new in progress.partial:
            tokens, logprobs, versions = new.tokens.tolist(), new.logprobs.tolist(), new.version.tolist()
            event = NewTokens(place=new.place, start=new.start, tokens=tokens, logprobs=logprobs, versions=versions)
            events.append((self._outstanding[new.handle], event))
        for ended in progress.ended:
            work = self._outstanding[ended.handle]
            events.append((work, Complete(place=ended.place, response=ended.response)))
            work.ended.add(ended.place)
            if len(work.ended) == work.sequences:
                del self._outstanding[ended.handle]
        return events

    def _send(self, events: list[tuple[Work, Event]]) -> None:
        if events and self._loop is not None and not self._loop.is_closed():
            self._reporting = self._reporting or any(isinstance(event, NewTokens) for _, event in events)
            # One call for all clients: waking the event loop costs more than delivering.
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _fail_all(self, reason: str) -> None:
        works = [*self._outstanding.values(), *(self._held.values() if self.fault is not None else ())]
        for handle in list(self._outstanding):
            try:
                self.engine.cancel(handle)
            except Exception as error:
                self.fault = f"the engine has stopped: {describe_error(error)}"
        self._outstanding.clear()
        self._send([(work, Failed(reason=reason)) for work in works])
        self._finish_draining()

    def _end_requests(self) -> None:
        self.fault = self.fault or SHUTTING_DOWN
        self._fail_all(self.fault)

    def _pause(self, mode: str, drained: "Future[None]") -> None:
        if mode == "abort":
            self._abort(set())
        self.mode = "draining" if mode == "wait" and self._outstanding else "paused"
        self._drained.append(drained)
        if self.mode == "paused":
            self._finish_draining()

    def _finish_draining(self) -> None:
        """Answer the pauses that wait, once nothing is in flight or the server is paused."""
        if self.mode == "draining" and not self._outstanding:
            self.mode = "paused"
        if self.mode == "paused":
            for future in self._drained:
                _answer(future)
            self._drained.clear()

    def _resume(self) -> None:
        self.mode = "running"
        for future in self._drained:
            _answer(future)
        self._drained.clear()
        works, self._held = list(self._held.values()), {}
        for work in works:
            self._submit(work)

    def _abort(self, names: set[str]) -> int:
        works = [work for work in (*self._outstanding.values(), *self._held.values()) if not names or work.name in names]
        for work in works:
            self._forget(work)
        self._send([(work, Aborted()) for work in works])
        return len(works)


def pause_after_report(seconds: float) -> float:
    """How long no new tokens are delivered after a delivery that took the event loop so long."""
    return min(SLOWEST_REPORT, seconds * (1 / REPORT_SHARE - 1))


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Run a function and put its result or its exception into the future, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _answer(future: "Future[None]") -> None:
    """Tell a handler that what it waits for has happened. It may have been cancelled."""
    with suppress(InvalidStateError):
        future.set_result(None)
