"""The connections of a client: one for each request in flight, used again, and ended from any thread."""

import contextlib
import json
import os
import random
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from legato.rollouts.servers.errors import ServerError, TooManyFilesError, UnreachableError
from legato.rollouts.servers.http import HttpClient

BODY_BYTES = 20_000


class Echo(ThreadingHTTPServer):
    """A server that answers with what it was sent, and counts its connections."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        self.connections = 0
        self.before: Callable[[], Any] = lambda: None
        """Called before every answer."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                owner.connections += 1

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                owner.before()
                data = json.dumps({**asked, "filler": "x" * BODY_BYTES}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                for start in range(0, len(data), 5000):
                    self.wfile.write(data[start : start + 5000])

            def log_message(self, *arguments: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle()

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        yield server
        server.shutdown()


def test_there_are_as_many_connections_as_requests_in_flight(echo: Echo) -> None:
    """However many threads ask, one after the other."""
    client, together = HttpClient(echo.url), threading.Barrier(3)
    echo.before = lambda: together.wait(10)
    for _ in range(10):
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(client.post, "/", {"n": number}, seconds=10.0) for number in range(3)]
            assert [each.result()["n"] for each in futures] == [0, 1, 2]
    assert echo.connections == 3
    client.close()


def test_many_threads_share_connections_while_others_drop_them(echo: Echo) -> None:
    """Every request gets its own answer or one error, and none waits for ever."""
    client, ends, results = HttpClient(echo.url), time.monotonic() + 20.0, Counter[str]()
    switch = sys.getswitchinterval()

    def has_seen_both() -> bool:
        return min(results["right"], results["UnreachableError"]) > 30 or time.monotonic() > ends

    def ask(thread: int) -> None:
        for number in range(10**6):
            if has_seen_both():
                return
            try:
                answer = client.post("/", {"thread": thread, "number": number}, seconds=10.0)
                results["right" if (answer["thread"], answer["number"]) == (thread, number) else "wrong"] += 1
            except ServerError as error:
                results[type(error).__name__] += 1
            except Exception as error:
                results[f"escaped {error!r}"] += 1

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(12)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        while not has_seen_both():
            time.sleep(0.005 * random.random())
            client.drop_connections()
        for thread in threads:
            thread.join(10)
    finally:
        sys.setswitchinterval(switch)
    assert not any(thread.is_alive() for thread in threads)
    assert set(results) <= {"right", "UnreachableError"} and min(results.values()) > 30, results
    client.close()
    with pytest.raises(UnreachableError, match="was closed by this process"):
        client.post("/", {}, seconds=1.0)


@pytest.fixture
def halting() -> Iterator[str]:
    """A server whose answers end with their connections, and never do."""
    listening, accepted = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listening.accept()[0])
                accepted[-1].recv(9999)
                accepted[-1].sendall(b"HTTP/1.0 200 OK\r\n\r\n{")

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()
    for connection in accepted:
        connection.close()


def test_an_answer_that_ends_with_its_connection_has_a_deadline_and_can_be_ended(halting: str) -> None:
    client, started = HttpClient(halting), time.monotonic()
    with pytest.raises(UnreachableError, match="in time"):
        client.get("/", seconds=0.5)
    threading.Timer(0.5, client.drop_connections).start()
    with pytest.raises(UnreachableError, match="was closed by this process"):
        client.get("/", seconds=30.0)
    assert time.monotonic() - started < 10.0
    client.close()


@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n", "HTTP/1.0 200 OK\r\n\r\n"])
def test_an_answer_that_comes_byte_by_byte_ends_at_its_deadline(head: str) -> None:
    """Each byte comes in time; together they would take a quarter of an hour."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection = listening.accept()[0]
                with connection:
                    connection.recv(9999)
                    connection.sendall(head.encode())
                    while True:
                        connection.sendall(b" ")
                        time.sleep(0.1)

        threading.Thread(target=serve, daemon=True).start()
        client, started = HttpClient(f"http://127.0.0.1:{listening.getsockname()[1]}"), time.monotonic()
        with pytest.raises(UnreachableError, match="in time"):
            client.get("/", seconds=0.5)
        assert time.monotonic() - started < 5.0
        client.close()


def test_a_request_that_is_ended_while_it_connects_is_not_sent(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    client = HttpClient(echo.url)
    open_socket = socket.create_connection

    def open_late(*arguments: Any, **options: Any) -> socket.socket:
        opened = open_socket(*arguments, **options)
        client.drop_connections()
        return opened

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", open_late)
        patch.setattr("http.client.socket.create_connection", open_late)
        with pytest.raises(UnreachableError, match="was closed by this process"):
            client.post("/", {}, seconds=5.0)
    assert client.post("/", {"n": 1}, seconds=5.0)["n"] == 1
    client.close()


def test_too_many_files_are_an_error_of_this_process(echo: Echo) -> None:
    limits, client, files = resource.getrlimit(resource.RLIMIT_NOFILE), HttpClient(echo.url), list[int]()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        with pytest.raises(OSError, match="Too many"):
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(TooManyFilesError, match=r"this process may have \d+ files open.* allow more \(ulimit -n\)"):
            client.post("/", {}, seconds=5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in files:
            os.close(file)
    assert client.post("/", {"n": 1}, seconds=5.0)["n"] == 1
    client.close()
