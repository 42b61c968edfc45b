"""Connections that send what a handler writes in one go as one piece.

uvicorn writes the head of an answer, its body and its end one by one, and each write is a system call in which the event
loop gives up the interpreter to the engine's thread.
"""

import asyncio
from importlib.util import find_spec
from typing import Any

TOO_LONG = "Request headers are too long."
MOST_BYTES = 2**16
"""More bytes than these are sent at once, so that a slow reader stops the writer as before."""


class JoinedWrites:
    """A transport whose writes are sent together in the next round of the event loop, or when it is closed."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if not data:
            return
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what was written."""
        parts, self._parts, self._size = self._parts, [], 0
        if parts:
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _joining(base: Any) -> Any:
    """A protocol of uvicorn over `JoinedWrites`."""

    class Joining(base):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(JoinedWrites(transport, self.loop))

        def on_response_complete(self) -> None:
            # Where many answers are written in one round of the loop, the first client begins its next request meanwhile.
            self.transport.flush()
            super().on_response_complete()

    return Joining


def joining_protocol(header_bytes: int) -> Any:
    """uvicorn's protocol over `JoinedWrites`: by httptools, whose parser is in C, where that is installed, else by h11.

    `header_bytes`: the most bytes of the headers of a request. uvicorn hands this limit to h11; httptools has none.
    """
    if find_spec("httptools") is None:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return _joining(H11Protocol)
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class JoiningProtocol(_joining(HttpToolsProtocol)):  # type: ignore[misc]
        """Refuses headers that are too long, whether they have ended or not."""

        _in_headers = _began = False
        _unended = 0
        """Bytes of headers that have not ended, without those that came with the first of them."""

        def data_received(self, data: bytes) -> None:
            self._began = False
            super().data_received(data)
            self._unended = self._unended + len(data) if self._in_headers and not self._began else 0
            if self._unended > header_bytes and not self.transport.is_closing():
                self.send_400_response(TOO_LONG)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = self._began = True

        def on_headers_complete(self) -> None:
            self._in_headers = False
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > header_bytes:
                # The parser stops, and uvicorn answers with 400.
                raise ValueError(TOO_LONG)
            super().on_headers_complete()

    return JoiningProtocol
