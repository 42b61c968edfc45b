"""Bodies in, answers out: JSON, or a stream of events that ends when the client is gone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from legato.serve.errors import ApiError
from legato.serve.limits import ServeLimits
from legato.serve.logprobs import Fragment
from legato.serve.values import Body, parse_json

_Result = TypeVar("_Result")


class ClientGone(Exception):  # noqa: N818  nobody is left to read an error
    """The client closed the connection before its answer was ready."""


async def read_body(request: Request, limits: ServeLimits) -> Body:
    """The JSON object of a request; ApiError if it is too large, too slow, too deep or no JSON."""
    return Body(parse_json(await _read_bytes(request, limits), limits.json_depth))


async def read_optional_body(request: Request, limits: ServeLimits) -> Body:
    """The JSON object of a request, or an empty one if the request has no body."""
    data = await _read_bytes(request, limits)
    return Body(parse_json(data, limits.json_depth) if data else {})


async def _read_bytes(request: Request, limits: ServeLimits) -> bytes:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"expected a body without Content-Encoding, got {encoding[:40]!r}; send it uncompressed")
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in ("application/json", "text/json", ""):
        raise ApiError(415, f"expected Content-Type application/json, got {kind[:80]!r}")
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise ApiError(413, f"expected a body of at most {limits.body_bytes} bytes, got more")
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"expected the body within {limits.body_seconds:g} s, got a part of it") from None
    return b"".join(parts)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON."""
    return Response(encode(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """The answer that an error stands for."""
    return json_response(error.body(), error.status, error.headers)


def encode(value: Any) -> bytes:
    """The value as JSON, with `Fragment`s in their places. Numbers that JSON does not have are null."""
    return orjson.dumps(value, default=_fragment, option=orjson.OPT_PASSTHROUGH_DATACLASS)


def _fragment(value: Any) -> orjson.Fragment:
    if not isinstance(value, Fragment):
        raise TypeError(f"expected a value that JSON has, got {type(value).__name__}")
    return orjson.Fragment(value.text)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of some work, which is cancelled if the client closes the connection (ClientGone)."""
    task, gone, ended = asyncio.current_task(), False, False
    assert task is not None

    def stop(disconnect: "asyncio.Task[None]") -> None:
        # A client that goes in the round in which the work ends: what this task does next is not cancelled.
        nonlocal gone
        if not ended and not disconnect.cancelled():
            gone = True
            task.cancel()

    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    disconnect.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and not task.uncancel():
            raise ClientGone from None
        raise
    finally:
        ended = True
        disconnect.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, one `data:` line each, and `[DONE]`. `close` is called however it ends, also before it began.

    Values are sent as JSON. An error after the first event is an event too.
    """

    media_type = "text/event-stream"

    def __init__(self, values: AsyncIterator[Any], close: Callable[[], None]) -> None:
        super().__init__(self._events(values), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await until_gone(receive, self.stream_response(send))
        finally:
            self._close()

    async def _events(self, values: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        try:
            async for value in values:
                yield b"data: " + encode(value) + b"\n\n"
        except ApiError as error:
            yield b"data: " + encode(error.body()) + b"\n\n"
        yield b"data: [DONE]\n\n"
