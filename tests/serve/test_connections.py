"""How the server writes, and what it keeps from waiting."""

import asyncio
import gc
import json
import math
from functools import partial
from typing import Any

import pytest
import torch

from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine
from legato.serve import connections
from legato.serve.connections import MOST_BYTES, JoinedWrites, joining_protocol
from legato.serve.engine_thread import DELIVERED_TOGETHER, EngineThread, Failed, NewTokens, Work
from legato.serve.http import ClientGone, until_gone
from legato.serve.logprobs import generate_own_logprobs
from legato.serve.server import COLLECT_EVERY, HEADER_BYTES, short_collections, uvicorn_config


class _Recorded(asyncio.Transport):
    """A transport that notes what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return name

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def joined() -> tuple[_Recorded, JoinedWrites]:
    recorded = _Recorded()
    return recorded, JoinedWrites(recorded, asyncio.get_running_loop())


def test_what_is_written_in_one_go_is_sent_as_one_piece() -> None:
    async def write() -> None:
        recorded, transport = joined()
        for part in (b"head", b"", b"body"):
            transport.write(part)
        assert recorded.sent == [], "later parts may follow"
        await asyncio.sleep(0)
        transport.write(b"more")
        await asyncio.sleep(0)
        assert recorded.sent == [b"headbody", b"more"]
        assert transport.get_extra_info("peername") == "peername"

    asyncio.run(write())


def test_nothing_is_lost_when_a_connection_is_closed_and_much_is_sent_at_once() -> None:
    async def write() -> None:
        recorded, transport = joined()
        transport.write(b"x" * (MOST_BYTES + 1))
        assert len(recorded.sent) == 1, "a slow reader must be able to stop the writer"
        transport.write(b"end")
        transport.close()
        assert recorded.sent[1:] == [b"end"] and recorded.closed
        await asyncio.sleep(0)
        assert len(recorded.sent) == 2

    asyncio.run(write())


def test_collections_leave_out_the_objects_that_exist_already() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with short_collections():
        assert gc.get_freeze_count() > frozen + 1000 and gc.get_threshold() == (COLLECT_EVERY, *before[1:])
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


@pytest.mark.parametrize("odd", [None, math.nan, -math.inf, -1e30])
def test_log_probs_are_written_whatever_they_are(odd: float | None) -> None:
    values = [-0.1, -1.0, 0.0, -1.1754943508222875e-38] + ([] if odd is None else [odd])
    written = json.loads(generate_own_logprobs(range(len(values)), values).text)["content"]
    expected = [None if math.isnan(value) else max(value, -9999.0) for value in values]
    assert [each["logprob"] for each in written] == [each["top_logprobs"][0]["logprob"] for each in written] == expected
    assert [each["token_id"] for each in written] == list(range(len(values)))
    assert json.loads(generate_own_logprobs([], []).text) == {"content": []}


@pytest.fixture(params=["httptools", "h11"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both parsers: h11 is taken where httptools is not installed."""
    found = None if request.param == "h11" else object()
    monkeypatch.setattr(connections, "find_spec", lambda name: found)
    return str(request.param)


def connect(app: Any) -> tuple[Any, _Recorded]:
    """A connection to an app, and what is sent over it."""
    from uvicorn.server import ServerState

    config = uvicorn_config(app)
    config.load()
    protocol = joining_protocol(HEADER_BYTES)(config, ServerState(), app_state={})
    recorded = _Recorded()
    recorded.get_extra_info = lambda name, default=None: default  # type: ignore[method-assign]
    protocol.connection_made(recorded)
    return protocol, recorded


@pytest.mark.usefixtures("parser")
def test_an_answer_is_sent_as_soon_as_it_is_complete() -> None:
    """Before the handlers of other clients, whose turn is in the same round of the loop, write theirs."""

    async def answer() -> list[int]:
        counts = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
            counts.append(len(recorded.sent))

        protocol, recorded = connect(app)
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.gather(*protocol.tasks)
        protocol.timeout_keep_alive_task.cancel()
        return counts

    assert asyncio.run(answer()) == [1], "head and body as one piece, before the handler goes on"


@pytest.mark.parametrize("ended", [True, False], ids=["whole", "without an end"])
@pytest.mark.parametrize("piece", [1000, 2**18], ids=["many pieces", "large pieces"])
def test_headers_that_are_too_long_are_refused(parser: str, piece: int, ended: bool) -> None:
    if parser == "h11" and ended and piece > HEADER_BYTES:
        pytest.skip("h11 bounds headers only as long as they have not ended")

    async def send() -> list[bytes]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("the request must not be handled")

        protocol, recorded = connect(app)
        head = b"POST / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (2 * HEADER_BYTES if ended else 4 * 2**18)
        head += b"\r\n\r\n" if ended else b""
        for place in range(0, len(head), piece):
            if not recorded.closed:
                protocol.data_received(head[place : place + piece])
        await asyncio.sleep(0)
        assert not protocol.tasks and recorded.closed
        return recorded.sent

    assert asyncio.run(send())[0].startswith(b"HTTP/1.1 400")


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("piece", [7000, 2**18, 2**20], ids=["small pieces", "large pieces", "one piece"])
def test_long_bodies_are_no_long_headers(piece: int) -> None:
    """Three requests after each other on one connection, each with a body of several times the most bytes of headers."""

    async def send() -> list[int]:
        sizes: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            size, more = 0, True
            while more:
                message = await receive()
                size, more = size + len(message["body"]), message.get("more_body", False)
            sizes.append(size)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        protocol, recorded = connect(app)
        body = b"b" * (5 * HEADER_BYTES)
        request = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        for _ in range(3):
            for place in range(0, len(request), piece):
                protocol.data_received(request[place : place + piece])
                await asyncio.sleep(0)
            await asyncio.gather(*protocol.tasks)
        protocol.timeout_keep_alive_task.cancel()
        assert not recorded.closed and all(sent.startswith(b"HTTP/1.1 200") for sent in recorded.sent)
        return sizes

    assert asyncio.run(send()) == [5 * HEADER_BYTES] * 3


def split(data: bytes, piece: int) -> list[bytes]:
    return [data[place : place + piece] for place in range(0, len(data), piece)]


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("piece", [11, 60, 10_000], ids=["small pieces", "pieces", "one piece"])
def test_a_client_that_offers_an_upgrade_is_answered_as_any_other(piece: int) -> None:
    """Java's client does: its first request over plain HTTP offers HTTP/2. The next one on the same connection does not."""

    async def send() -> tuple[list[bytes], int]:
        bodies: list[bytes] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message["body"], message.get("more_body", False)
            bodies.append(body)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        protocol, recorded = connect(app)
        current = [protocol]
        recorded.set_protocol = lambda new: current.append(new)  # type: ignore[method-assign]
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        for headers, body in ((offer, b"GET / HTTP/1.1"), (b"", b"second")):
            request = b"POST / HTTP/1.1\r\nHost: a\r\n%sContent-Length: %d\r\n\r\n" % (headers, len(body)) + body
            for data in split(request, piece):
                current[-1].data_received(data)
                await asyncio.sleep(0)
            await asyncio.gather(*current[-1].tasks)
            await asyncio.sleep(0)
        current[-1].timeout_keep_alive_task.cancel()
        assert not recorded.closed and b"".join(recorded.sent).count(b"HTTP/1.1 200") == 2
        assert len(current[-1].connections) == 1, "the connection is counted once"
        return bodies, b"".join(recorded.sent).count(b"HTTP/1.1")

    assert asyncio.run(send()) == ([b"GET / HTTP/1.1", b"second"], 2)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    "rest",
    [b"X: y\r\n" * 40_000, b"X: " + b"y" * 2**19, b"5;" + b"e" * 2**19],
    ids=["many trailers", "an endless trailer", "an endless extension"],
)
def test_what_follows_a_body_in_chunks_is_bounded(rest: bytes) -> None:
    async def send() -> int:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass

        protocol, recorded = connect(app)
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        protocol.data_received(head + (b"" if rest.startswith(b"5") else b"0\r\n"))
        taken = 0
        for data in split(rest, 4096):
            if not recorded.closed:
                protocol.data_received(data)
                taken += len(data)
        for task in protocol.tasks:
            task.cancel()
        await asyncio.gather(*protocol.tasks, return_exceptions=True)
        assert recorded.closed
        return taken

    assert asyncio.run(send()) <= 2 * HEADER_BYTES


def test_trailers_are_refused_and_never_taken_for_headers() -> None:
    """httptools hands both to the same function, and headers decide who may ask."""

    async def send() -> tuple[list[bytes], list[Any]]:
        asked: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            asked.append(dict(scope["headers"]))

        protocol, recorded = connect(app)
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        protocol.data_received(head + b"0\r\nAuthorization: Bearer key\r\n\r\n")
        await asyncio.gather(*protocol.tasks, return_exceptions=True)
        return recorded.sent, asked

    sent, asked = asyncio.run(send())
    assert sent[0].startswith(b"HTTP/1.1 400") and all(b"authorization" not in headers for headers in asked)


def test_the_first_of_many_clients_is_answered_before_the_last_is_told() -> None:
    """And every client gets its events in order, also those of deliveries that overlap."""

    async def deliver() -> tuple[list[int], list[str]]:
        thread = EngineThread(ScriptedEngine(lambda prompt, sample: ([3], [-0.5]), str))
        thread._loop = asyncio.get_running_loop()
        answered, told = [], []
        count = 5 * DELIVERED_TOGETHER

        async def handle(number: int, queue: "asyncio.Queue[Any]") -> None:
            await queue.get()
            answered.append(len(told))  # how many had been told when this one was answered
            await queue.get()

        queues: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(count)]
        handlers = [asyncio.create_task(handle(*each)) for each in enumerate(queues)]

        def make_work(number: int) -> Work:
            def take(event: Any) -> None:
                told.append(f"{number} {event.reason}")
                queues[number].put_nowait(event)

            return work_for(take)

        works = [make_work(number) for number in range(count)]
        for reason in ("first", "second"):
            thread._deliver([(each, Failed(reason=reason)) for each in works])
        await asyncio.gather(*handlers)
        return answered, told

    answered, told = asyncio.run(deliver())
    assert told == [f"{number} {reason}" for reason in ("first", "second") for number in range(len(answered))]
    assert answered[0] == DELIVERED_TOGETHER and answered == sorted(answered)


def work_for(deliver: Any) -> Work:
    request = Request(prompt=torch.tensor([5]), seeds=(1,))
    limits = Limits(max_response_tokens=1, end_tokens=())
    return Work(request=request, sampling=Sampling(), limits=limits, watched=False, deliver=deliver)


def test_a_stream_goes_on_while_whole_responses_of_others_never_end() -> None:
    """Clients that ask again at once keep events waiting for delivery: a report of new tokens has its end all the same."""

    async def deliver() -> None:
        thread = EngineThread(ScriptedEngine(lambda prompt, sample: ([3], [-0.5]), str))
        thread._loop = asyncio.get_running_loop()

        def ask_again(event: Any) -> None:
            thread._send([(work_for(ask_again), event)])

        written = list[Any]()
        thread._send([(work_for(ask_again), Failed(reason="ended")) for _ in range(4 * DELIVERED_TOGETHER)])
        tokens = NewTokens(place=0, start=0, tokens=[3], logprobs=[-0.5], versions=[0])
        thread._send([(work_for(written.append), tokens)])
        reporting = []
        for _ in range(100):
            await asyncio.sleep(0)
            reporting.append((len(written), thread._reporting))
        assert thread._undelivered, "clients have asked again"
        assert reporting[-1] == (1, False)
        assert all(busy for count, busy in reporting if not count), "a report ends after its tokens are delivered"

    asyncio.run(deliver())


def test_work_is_cancelled_when_the_client_is_gone_and_only_then() -> None:
    ended: list[str] = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return "done"

    async def receive(gone: "asyncio.Event") -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def wait_with(gone: "asyncio.Event") -> str:
        await asyncio.sleep(0)  # the watcher waits first
        await asyncio.sleep(0)
        await gone.wait()
        return "done"

    async def check() -> None:
        gone = asyncio.Event()
        assert await until_gone(partial(receive, gone), work(0.0)) == "done"
        task = asyncio.create_task(until_gone(partial(receive, gone), work(60.0)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(gone.set)
        with pytest.raises(ClientGone):
            await task
        assert ended == ["cancelled"] and not task.cancelled()
        # A server that shuts down cancels the handler: that is not a client who has gone.
        task = asyncio.create_task(until_gone(partial(receive, asyncio.Event()), work(60.0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cancelled", "cancelled"]
        # The task goes on after a client has gone: nothing of the cancellation is left in it.
        with pytest.raises(ClientGone):
            await until_gone(partial(receive, gone), work(60.0))
        # A client that goes as the work ends: the answer is there, and nothing after it is cancelled.
        gone.clear()
        asyncio.get_running_loop().call_later(0.01, gone.set)
        assert await until_gone(partial(receive, gone), wait_with(gone)) == "done"
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())
