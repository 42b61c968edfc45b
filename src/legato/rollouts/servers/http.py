"""JSON over HTTP to one server: a deadline for each request, bounded answers, connections that are kept and reused.

    client = HttpClient("http://127.0.0.1:8000", key="...")
    client.post("/inference/v1/generate", {"token_ids": [...], ...}, seconds=60)

Standard library only. Any thread may use a client: every request has a connection to itself, which the next one uses again.
"""

import contextlib
import errno
import http.client
import json
import math
import resource
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from legato.errors import InputError, shorten
from legato.rollouts.servers.errors import (
    BadReplyError,
    BusyError,
    FailedError,
    RefusedError,
    ServerError,
    TooManyFilesError,
    UnreachableError,
)

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
        self._host, self._port = parts.hostname, parts.port
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._lock = threading.Lock()
        self._busy: set[_Connection] = set()
        """The connections of requests in flight. A request whose connection is not here has been ended."""
        self._idle: deque[_Connection] = deque()
        """The connections that no request uses. The one at the right was used last and is used next."""
        self._closed = False

    def get(self, path: str, *, seconds: float) -> dict[str, Any]:
        """The JSON object at a path."""
        return _parse(self._fetch("GET", path, None, seconds))

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float) -> dict[str, Any]:
        """The JSON object that answers a body."""
        return _parse(self._fetch("POST", path, body, seconds))

    def tell(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float) -> None:
        """A request whose answer is its status alone: some servers send an empty body or plain text."""
        self._fetch(method, path, body, seconds)

    def stream(self, path: str, body: Mapping[str, Any], *, seconds: float) -> Iterator[dict[str, Any]]:
        """The JSON objects that a server sends as events, until `[DONE]`. A stream that ends without it is an error."""
        deadline = time.monotonic() + seconds
        # The connection is not used again: what follows on it belongs to nobody.
        with self._connection() as connection:
            response = self._send(connection, "POST", path, body, deadline)
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

    def drop_connections(self) -> None:
        """End the requests in flight and close all connections. Later requests open new ones."""
        with self._lock:
            for connection in self._busy:
                connection.wake()  # its thread closes it
            self._busy.clear()
            while self._idle:
                self._idle.pop().close()

    def close(self) -> None:
        """End the requests in flight and close all connections. Later requests fail."""
        self._closed = True
        self.drop_connections()

    def _fetch(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        with self._connection() as connection:
            response = self._send(connection, method, path, body, deadline)
            data = _read(connection, response, deadline)
            connection.reusable = not response.will_close
        if response.status != 200:
            raise _error_of(response.status, data, response.headers)
        return data

    @contextlib.contextmanager
    def _connection(self) -> Iterator["_Connection"]:
        """A connection that no other request uses meanwhile. Errors of it become those that callers expect."""
        connection = self._take_connection()
        try:
            yield connection
        except Exception as error:
            self._check_in_use(connection, error)
            if isinstance(error, OSError | http.client.HTTPException):
                raise _error_of_connection(self.url, error) from error
            raise
        else:
            self._check_in_use(connection)
        finally:
            self._give_back(connection)

    def _take_connection(self) -> "_Connection":
        """The idle connection that was used last; if there is none, a new one that is not open yet."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_closed:
                    break
                connection.close()
            else:
                connection = _Connection(self._host, self._port, self._context)
            self._busy.add(connection)
        return connection

    def _give_back(self, connection: "_Connection") -> None:
        """Keep a connection for the next request, or close it."""
        with self._lock:
            in_use = connection in self._busy
            self._busy.discard(connection)
            if not (in_use and connection.reusable):
                connection.close()
                return
            connection.reusable = False
            # Those that are used last may wait for their turn until the server closes them.
            while self._idle and self._idle[0].is_closed:
                self._idle.popleft().close()
            self._idle.append(connection)

    def _check_in_use(self, connection: "_Connection", cause: Exception | None = None) -> None:
        """UnreachableError if a request was ended by this process: its connection may raise anything, or seem to end."""
        with self._lock:
            if self._closed or connection not in self._busy:
                raise UnreachableError(f"the connection to {self.url} was closed by this process") from cause

    def _send(
        self, connection: "_Connection", method: str, path: str, body: Mapping[str, Any] | None, deadline: float
    ) -> http.client.HTTPResponse:
        """Send a request and read the head of its answer."""
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        if connection.sock is None:
            connection.open(deadline)
        # While it was opened there was no socket to wake.
        self._check_in_use(connection)
        connection.limit(deadline)
        connection.http.request(method, path, data, self._headers)
        connection.limit(deadline)
        connection.response = connection.http.getresponse()
        return connection.response


class _Connection:
    """A connection to a server. It has one owner at a time, who alone closes it."""

    def __init__(self, host: str, port: int | None, context: ssl.SSLContext | None) -> None:
        if context is None:
            self.http = http.client.HTTPConnection(host, port)
        else:
            self.http = http.client.HTTPSConnection(host, port, context=context)
        self.http.auto_open = 0
        self.sock: socket.socket | None = None
        """The socket, which `http` forgets before it has read an answer that ends with the connection."""
        self.response: http.client.HTTPResponse | None = None
        self.reusable = False
        """Whether an answer was read to its end and the server keeps the connection open."""

    def open(self, deadline: float) -> None:
        self.http.timeout = min(CONNECT_SECONDS, _seconds_left(deadline))
        self.http.connect()
        self.sock = self.http.sock

    def limit(self, deadline: float) -> None:
        """Let no read or write go beyond the deadline."""
        assert self.sock is not None
        self.sock.settimeout(_seconds_left(deadline))

    @property
    def is_closed(self) -> bool:
        """Whether the server closed an idle connection: then nothing is sent on it, so that nothing is sent twice."""
        assert self.sock is not None
        waiting = select.poll()
        waiting.register(self.sock, select.POLLIN)
        return bool(waiting.poll(0))

    def wake(self) -> None:
        """End the waiting of the thread that uses the connection: closing a socket does not."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                # Else a server that sends more than is read would wait for a minute.
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # Under TLS its own `shutdown` would let the thread go on in plain text.
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        if self.response is not None:
            self.response.close()
        self.http.close()


def _seconds_left(deadline: float) -> float:
    """The seconds left; UnreachableError if there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise UnreachableError("no answer in time")
    return seconds


def _read(connection: _Connection, response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body of an answer."""
    parts, size = [], 0
    while True:
        connection.limit(deadline)
        part = response.read1(2**16)  # `read` would wait for all of it, with the time left for each piece
        if not part:
            break
        size += len(part)
        if size > MOST_BYTES:
            raise BadReplyError(f"expected an answer of at most {MOST_BYTES} bytes, got more")
        parts.append(part)
    if response.length:  # it said how much would come
        raise UnreachableError(f"the answer ended {response.length} bytes too early")
    response.close()  # `read1` does not do so at the end, and the connection would take no other request
    return b"".join(parts)


def _events(connection: _Connection, response: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
    """The data of server-sent events, one line each."""
    size = 0
    while True:
        connection.limit(deadline)
        line = response.readline(MOST_BYTES)
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


def _error_of_connection(url: str, error: Exception) -> Exception:
    """What the error of a connection says: of the server, or of this process."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return TooManyFilesError(
            f"expected to open a connection to {url}, got {error.strerror!r}: this process may have {limit} files open, and"
            " every request in flight is one; allow more (ulimit -n) or lower rollouts.rows_at_once"
        )
    if isinstance(error, TimeoutError):
        return UnreachableError(f"no answer of {url} in time")
    return UnreachableError(f"no answer of {url}: {type(error).__name__}: {error}")
