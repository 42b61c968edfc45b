"""Listens on an address and serves until interrupted."""

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from legato.core.open_files import raise_file_limit
from legato.errors import InputError
from legato.serve.app import application
from legato.serve.served import Served

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADER_BYTES = 2**16
"""The most bytes of the headers of a request."""
FILES_KEPT = 256
"""Files that are left for everything but connections. More connections are answered with 503."""
END_SECONDS, CANCEL_SECONDS = 4.0, 5
"""Seconds after a signal to end: requests in flight get an error; those that are left then (prompts are scored) are cut."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none sends a request while the server closes one."""
COLLECT_EVERY = 20_000
"""How many more objects there are before garbage is collected; Python's own number, 700, is that of a few requests."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on this host."""
    return host in ("localhost", "::1") or host.startswith("127.")


def allowed_hosts(host: str, port: int) -> list[str] | None:
    """The Host headers to answer; None (any) where others than this machine can reach the server."""
    return [f"{name}:{port}" for name in (*LOOPBACK, host)] if is_loopback(host) else None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; InputError if the port cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"expected the name or address of this machine, got {host!r}: {error.strerror} (--host)") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)  # from here on requests wait instead of being refused
    except OSError as error:
        listening.close()
        raise InputError(f"port {port} of {host} cannot be used: {error.strerror}; --port 0 takes a free one") from None
    return listening


def uvicorn_config(app: Any) -> Any:
    """The settings of uvicorn: bounded headers and connections, no log of requests."""
    import uvicorn

    from legato.serve.connections import joining_protocol

    connections = max(64, raise_file_limit() - FILES_KEPT)
    return uvicorn.Config(
        app,
        http=joining_protocol(HEADER_BYTES),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CANCEL_SECONDS,
        limit_concurrency=connections,
    )


@contextlib.contextmanager
def shared_interpreter() -> Iterator[None]:
    """Inside, threads of this process take turns more often than Python lets them by itself.

    The engine's thread needs the interpreter for a moment before every step. While handlers write JSON it would wait 5 ms
    each time: on two cores 64 clients of the tiny model then get half of the tokens.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Inside, garbage collections look only at objects that are made inside.

    Objects of PyTorch, transformers and the model are many: a full collection took 0.3 s, all threads waited for it, and
    every burst of 256 requests set one off.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def serve_until_interrupted(
    served: Served,
    listening: socket.socket,
    host: str,
    *,
    key: str,
    follow_seconds: float | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve on a listening socket; `on_ready` is called once requests are answered."""
    import uvicorn

    port = listening.getsockname()[1]
    app = application(served, key=key, hosts=allowed_hosts(host, port), follow_seconds=follow_seconds)
    server = uvicorn.Server(uvicorn_config(app))

    async def run() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_ready()
        ending = asyncio.create_task(end_requests())
        await serving
        ending.cancel()

    async def end_requests() -> None:
        # uvicorn would cancel the handlers: broken streams, answers that are no JSON, and a traceback for each.
        while not server.should_exit:
            await asyncio.sleep(0.1)
        await asyncio.sleep(END_SECONDS)
        with contextlib.suppress(RuntimeError):  # the engine's thread has ended before
            await served.thread.end_requests()

    with contextlib.closing(listening), shared_interpreter(), short_collections():
        asyncio.run(run())
