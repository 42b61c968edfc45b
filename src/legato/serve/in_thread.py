"""A server on loopback in threads of this process: for agents of a run, and for a judge that is loaded beside the policy."""

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from legato.serve.app import application
from legato.serve.recording import Recording
from legato.serve.served import Served
from legato.serve.server import allowed_hosts, listen, shared_interpreter, uvicorn_config

_T = TypeVar("_T")

HOST = "127.0.0.1"
CLOSE_SECONDS = 5.0
"""How long what runs may take to end once it is cancelled."""


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> "concurrent.futures.Future[_T]":
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel what runs and end the thread. A thread that hangs in code of the user's is left behind."""
        with contextlib.suppress(Exception):
            self.submit(self._cancel_all()).result(CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_SECONDS)

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


class ThreadServer:
    """Serves on a free port with a random key, from its construction until `close`."""

    def __init__(self, served: Served, recordings: Mapping[str, Recording] | None = None) -> None:
        """With `recordings` it answers the requests of these episodes and no others."""
        import uvicorn

        self.served, self.key = served, secrets.token_urlsafe(24)
        self._listening = listen(HOST, 0)
        port: int = self._listening.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        app = application(served, key=self.key, hosts=allowed_hosts(HOST, port), recordings=recordings)
        self._server = uvicorn.Server(uvicorn_config(app))
        self.thread = LoopThread("server")
        self._serving = self.thread.submit(self._serve())

    async def _serve(self) -> None:
        with shared_interpreter():
            await self._server.serve(sockets=[self._listening])

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        with contextlib.suppress(Exception):
            self._serving.result(CLOSE_SECONDS)
        self._listening.close()
        self.thread.close()
