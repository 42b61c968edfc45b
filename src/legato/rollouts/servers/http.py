"""JSON over HTTP to one server: a deadline for each request, bounded answers, connections that are kept and reused.

    client = HttpClient("http://127.0.0.1:8000", key="...")
    client.post("/inference/v1/generate", {"token_ids": [...], ...}, seconds=60)

Standard library only. Any thread may use a client: each has a connection of its own.
"""

import contextlib
import http.client
import json
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from legato.errors import InputError, shorten
from legato.rollouts.servers.errors import BadReplyError, BusyError, FailedError, RefusedError, ServerError, UnreachableError

MOST_BYTES = 2**28
"""The most bytes of an answer: a million tokens with log-probs take about a third of it."""
CONNECT_SECONDS = 10.0


def read_address(url: str) -> str:
    """The address of a server without a path: "http://127.0.0.1:8000" also of ".../v1"; InputError if it is none."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == -1
        or parts.path.rstrip("/") not in ("", "/v1")
    ):
        raise InputError(f"expected the address of a server as in http://127.0.0.1:8000, got {url!r}")
    if parts.query or parts.fragment or parts.username is not None:
        raise InputError(f"expected an address without a query, a fragment or a user, got {url!r}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


class HttpClient:
    """Requests to one server. Errors are `ServerError`s, by what the caller should do."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = read_address(url)
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._own = threading.local()
        self._all: set[http.client.HTTPConnection] = set()
        """The connections of all threads."""

    def get(self, path: str, *, seconds: float) -> dict[str, Any]:
        """The JSON object at a path."""
        return self._ask("GET", path, None, seconds)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float) -> dict[str, Any]:
        """The JSON object that answers a body."""
        return self._ask("POST", path, body, seconds)

    def tell(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float) -> None:
        """A request whose answer is its status alone: some servers send an empty body or plain text."""
        self._fetch(method, path, body, seconds)

    def stream(self, path: str, body: Mapping[str, Any], *, seconds: float) -> Iterator[dict[str, Any]]:
        """The JSON objects that a server sends as events, until `[DONE]`. A stream that ends without it is an error."""
        deadline = time.monotonic() + seconds
        connection, response = self._open("POST", path, body, deadline)
        try:
            if response.status != 200:
                raise _error_of(response.status, _read(connection, response, deadline), response.headers)
            for data in _events(connection, response, deadline):
                if data == b"[DONE]":
                    return
                value = _parse(data)
                if isinstance(value.get("error"), dict):
                    raise FailedError(500, _message(value))
                yield value
            raise UnreachableError(f"{self.url} closed a stream before its end")
        finally:
            # What follows on this connection belongs to nobody.
            response.close()
            self._drop()

    def close(self) -> None:
        """Close the connections of all threads. Requests in flight fail; later ones open new connections."""
        for connection in list(self._all):
            self._all.discard(connection)
            _wake(connection)
            connection.close()

    def release(self) -> None:
        """Close the connection of this thread, which is about to end."""
        self._drop()

    def _was_closed(self) -> bool:
        """Whether `close` has closed the connection of this thread: it may raise anything then."""
        connection = getattr(self._own, "connection", None)
        return connection is not None and connection not in self._all

    def _drop(self) -> None:
        """Close the connection of this thread."""
        connection = getattr(self._own, "connection", None)
        self._own.connection = None
        if connection is not None:
            self._all.discard(connection)
            connection.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        return _parse(self._fetch(method, path, body, seconds))

    def _fetch(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        try:
            connection, response = self._open(method, path, body, deadline)
            with contextlib.closing(response):
                data = _read(connection, response, deadline)
        except Exception as error:
            closed = self._was_closed()
            self._drop()
            if closed and not isinstance(error, ServerError):
                raise UnreachableError(f"the connection to {self.url} was closed by this process") from error
            raise
        except BaseException:
            self._drop()
            raise
        if response.status != 200:
            raise _error_of(response.status, data, response.headers)
        return data

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request and read the head of its answer."""
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        try:
            connection = self._connection(deadline)
            connection.request(method, path, data, self._headers)
            _limit(connection, deadline)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise _unreachable(self.url, error) from error

    def _connection(self, deadline: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is not None and (self._was_closed() or _is_closed(connection)):
            self._drop()
            connection = None
        if connection is None:
            seconds = min(CONNECT_SECONDS, _seconds_left(deadline))
            if self._secure:
                context = ssl.create_default_context()
                connection = http.client.HTTPSConnection(self._host, self._port, timeout=seconds, context=context)
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
            self._own.connection = connection
            self._all.add(connection)
        else:
            _limit(connection, deadline)
        return connection


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether a kept connection was closed by either side: then nothing is sent on it, so that nothing is sent twice."""
    if connection.sock is None:
        return True
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return bool(waiting.poll(0))


def _wake(connection: http.client.HTTPConnection) -> None:
    """End the waiting of a thread that reads from a connection: closing a socket does not."""
    waiting = connection.sock
    if waiting is not None:
        with contextlib.suppress(OSError):
            waiting.shutdown(socket.SHUT_RDWR)


def _seconds_left(deadline: float) -> float:
    """The seconds left; UnreachableError if there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise UnreachableError("no answer in time")
    return seconds


def _limit(connection: http.client.HTTPConnection, deadline: float) -> None:
    """Let no read or write of a connection go beyond the deadline."""
    if connection.sock is not None:
        connection.sock.settimeout(_seconds_left(deadline))


def _read(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body of an answer."""
    parts, size = [], 0
    try:
        while True:
            _limit(connection, deadline)
            part = response.read(2**16)
            if not part:
                break
            size += len(part)
            if size > MOST_BYTES:
                raise BadReplyError(f"expected an answer of at most {MOST_BYTES} bytes, got more")
            parts.append(part)
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable("the server", error) from error
    if response.length:  # it said how much would come
        raise UnreachableError(f"the answer ended {response.length} bytes too early")
    return b"".join(parts)


def _events(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
    """The data of server-sent events, one line each."""
    size = 0
    while True:
        try:
            _limit(connection, deadline)
            line = response.readline(MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable("the server", error) from error
        size += len(line)
        if not line:
            return
        if size > MOST_BYTES:
            raise BadReplyError(f"expected a stream of at most {MOST_BYTES} bytes, got more")
        if line.startswith(b"data:"):
            if not line.endswith(b"\n"):
                raise UnreachableError("the stream ended in the middle of an event")
            yield line[5:].strip()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadReplyError(f"expected JSON, got {shorten(repr(data), 200)}: {error}") from None
    if not isinstance(value, dict):
        raise BadReplyError(f"expected a JSON object, got {shorten(repr(value), 200)}")
    return value


def _error_of(status: int, data: bytes, headers: Any) -> ServerError:
    """The error that a status stands for."""
    try:
        message = _message(_parse(data))
    except BadReplyError:
        message = shorten(data.decode("utf-8", "replace"), 300)
    if status in (408, 429):
        return BusyError(message, _seconds(headers.get("retry-after")))
    return FailedError(status, message) if status >= 500 else RefusedError(status, message)


def _seconds(value: str | None) -> float:
    try:
        seconds = float(value or 1.0)
    except ValueError:
        return 1.0
    return min(60.0, max(0.0, seconds)) if math.isfinite(seconds) else 1.0


def _message(value: Mapping[str, Any]) -> str:
    """The message in an error of OpenAI's API, of FastAPI, or in any other object."""
    error = value.get("error", value.get("detail", value))
    return shorten(str(error.get("message", error) if isinstance(error, dict) else error), 500)


def _unreachable(url: str, error: Exception) -> ServerError:
    if isinstance(error, ServerError):
        return error
    if isinstance(error, TimeoutError):
        return UnreachableError(f"no answer of {url} in time")
    return UnreachableError(f"no answer of {url}: {type(error).__name__}: {error}")
