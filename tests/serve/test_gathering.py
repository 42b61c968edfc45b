"""Requests that find the engine idle begin together; those that find it busy do not wait."""

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence

import pytest
import torch

from legato.core.rollout import StopReason
from legato.rollouts.engine import Ended, Engine, Handle, Limits, Progress, Request, Response
from legato.rollouts.sampling import Sampling
from legato.serve import engine_thread
from legato.serve.engine_thread import Complete, EngineThread, Event, Work

LIMITS = Limits(max_response_tokens=1, end_tokens=())
RESPONSE = Response(
    tokens=torch.tensor([5]),
    logprobs=torch.zeros(1),
    kept_logmass=None,
    text="",
    stop=StopReason.LENGTH,
    version=torch.zeros(1, dtype=torch.int64),
)


class Counting(Engine):
    """Notes how many requests each round of decoding has, and ends the oldest of them."""

    def __init__(self, rounds_first: int) -> None:
        self.waiting: list[Handle] = []
        self.rounds: list[int] = []
        self.left = rounds_first
        """Rounds before anything ends."""

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        handles = [Handle(len(self.rounds) * 1000 + len(self.waiting) + place) for place in range(len(requests))]
        self.waiting += handles
        return handles

    def decode_briefly(self, watched: Collection[Handle] = ()) -> Progress:
        self.rounds.append(len(self.waiting))
        time.sleep(0.01)
        self.left -= 1
        if self.left > 0:
            return Progress()
        return Progress(ended=(Ended(handle=self.waiting.pop(0), place=0, response=RESPONSE),))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine_thread, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(engine_thread, "MOST_GATHERING_SECONDS", 30.0)
    yield


async def run_works(engine: Counting, count: int, pause: float) -> list[Event]:
    thread, events = EngineThread(engine), list[Event]()
    thread.start(asyncio.get_running_loop())
    ended = asyncio.Event()

    def deliver(event: Event) -> None:
        events.append(event)
        if len(events) == count:
            ended.set()

    for number in range(count):
        request = Request(prompt=torch.tensor([3]), seeds=(number,))
        thread.submit(Work(request=request, sampling=Sampling(), limits=LIMITS, watched=False, deliver=deliver))
        await asyncio.sleep(pause)
    await asyncio.wait_for(ended.wait(), 60)
    await asyncio.to_thread(thread.stop)
    return events


def test_requests_that_find_the_engine_idle_begin_together(patient: None) -> None:
    engine = Counting(0)
    events = asyncio.run(run_works(engine, 6, 0.01))
    assert engine.rounds == [6, 5, 4, 3, 2, 1] and all(isinstance(event, Complete) for event in events)


def test_a_request_that_finds_the_engine_busy_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "QUIET_SECONDS", 0.01)
    engine = Counting(30)

    async def late() -> None:
        works = asyncio.create_task(run_works(engine, 2, 0.15))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(engine_thread, "QUIET_SECONDS", 60.0)
        await works

    asyncio.run(late())
    assert engine.rounds[0] == 1 and 2 in engine.rounds


def test_the_first_request_waits_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "QUIET_SECONDS", 60.0)
    monkeypatch.setattr(engine_thread, "MOST_GATHERING_SECONDS", 0.2)
    engine, began = Counting(0), time.monotonic()
    asyncio.run(run_works(engine, 1, 0.0))
    assert 0.2 <= time.monotonic() - began < 30
