"""Connections that send what a handler writes in one go as one piece.

uvicorn writes the head of an answer, its body and its end one by one, and each write is a system call in which the event
loop gives up the interpreter to the engine's thread.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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


class JoiningProtocol(H11Protocol):
    """uvicorn's protocol over `JoinedWrites`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        # Where many answers are written in one round of the loop, the first client begins its next request meanwhile.
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
