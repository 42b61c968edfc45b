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
        self.plain, self._loop = transport, loop
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
            self.plain.write(b"".join(parts))

    def close(self) -> None:
        self.flush()
        self.plain.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def _joining(base: Any) -> Any:
    """A protocol of uvicorn over `JoinedWrites`."""

    class Joining(base):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(JoinedWrites(transport, self.loop))

        def on_response_complete(self) -> None:
            # Where many answers are written in one round of the loop, the first client begins its next request meanwhile.
            self.transport.flush()
            super().on_response_complete()

        def _unsupported_upgrade_warning(self) -> None:
            """Say nothing: a client may offer an upgrade, and is answered without."""

    return Joining


def joining_protocol(header_bytes: int) -> Any:
    """uvicorn's protocol over `JoinedWrites`: by httptools, whose parser is in C, where that is installed, else by h11.

    `header_bytes`: the most bytes of the headers of a request. uvicorn hands this limit to h11; httptools has none.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    plain = _joining(H11Protocol)
    if find_spec("httptools") is None:
        return plain
    from httptools import HttpParserError
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class JoiningProtocol(_joining(HttpToolsProtocol)):  # type: ignore[misc]
        """Bounds what httptools does not: headers, trailers and chunk extensions, whether they end or not.

        A connection whose client offers to upgrade it goes to h11, which reads on: Java's client does so with every first
        request, and httptools drops the body of such a request.
        """

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._made_of = (arguments, options)
            self._in_headers = self._moved = self._upgrades = False
            self._idle_bytes = 0
            """Bytes that came since anything but headers or trailers that have not ended."""
            self._begun = 0
            """How many requests began in the pieces that are kept."""
            self._pieces: list[bytes] = []
            """What came since the last request began, until its headers have ended."""

        def data_received(self, data: bytes) -> None:
            if not self._in_headers:
                self._pieces, self._begun = [], 0
            self._pieces.append(data)
            self._moved = False
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(data)
            except HttpParserError:
                if self._upgrades:
                    self._read_on()
                else:
                    self.send_400_response("Invalid HTTP request received.")
                return
            if not self._in_headers:
                self._pieces = []
            self._idle_bytes = 0 if self._moved else self._idle_bytes + len(data)
            if self._idle_bytes > header_bytes and not self.transport.is_closing():
                self.send_400_response(TOO_LONG)

        def _read_on(self) -> None:
            """Let h11 read this request again, and all that follows."""
            arguments, options = self._made_of
            protocol, transport = plain(*arguments, **options), self.transport
            transport.flush()
            self.connections.discard(self)
            protocol.connection_made(transport.plain)
            transport.plain.set_protocol(protocol)
            protocol.data_received(b"".join(self._pieces))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = self._moved = True
            self._begun += 1

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._in_headers:
                raise ValueError("no client of this server needs trailers")
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_headers, self._moved = False, True
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > header_bytes:
                # The parser stops, and uvicorn answers with 400.
                raise ValueError(TOO_LONG)
            if self.parser.should_upgrade():
                # Of a request behind others in one piece it is not known where it begins: that is refused.
                self._upgrades = self._begun == 1 and (self.cycle is None or self.cycle.response_complete)
                raise ValueError("a connection that is offered for an upgrade")
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._moved = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._moved = True
            super().on_message_complete()

    return JoiningProtocol
