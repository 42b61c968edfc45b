"""Functions that may hang or crash, run in processes that can be killed.

    workers = shared("legato.rewards.math_worker:compare")
    workers.ask("1/2", "0.5", seconds=5)  ->  what compare("1/2", "0.5") returns, or TimedOutError, DiedError, RefusedError

A worker is a fresh interpreter, started at the first question and never forked: the calling process may hold CUDA and
threads. It imports the named module and not the caller's main program, so it is small. Questions and replies are JSON on a
socket, so a reply is only data, even from a compromised worker. A worker has few environment variables and a memory limit,
cannot write files, and is ended by a CPU limit if the caller dies in the middle of a question.

These are limits on time and memory; a worker is no sandbox for programs.
"""

import atexit
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from importlib import import_module
from typing import Any

from legato.errors import describe_error

START_SECONDS = 120.0
"""How long a worker may take to import what it needs; a loaded machine is slow at that."""
MEMORY_BYTES = 4 * 2**30
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""The environment variables a worker gets: no tokens, no keys."""


class TimedOutError(Exception):
    """The question was not answered in time; its worker was killed."""


class DiedError(Exception):
    """Two workers ended in the middle of the question, or none could be started."""


class RefusedError(Exception):
    """The function raised; the message names the exception."""


class Workers:
    """A pool of at most `count` processes that call `function` ("module:name"). They are started when they are needed.

    Any thread may ask; threads beyond `count` wait. After a fork the child has its own, empty pool. `limited` False is for
    code that the user trusts: it has the whole environment, prints, writes files, and may use all memory.
    """

    def __init__(
        self, function: str, *, count: int | None = None, questions_per_worker: int = 1000, limited: bool = True
    ) -> None:
        self.function, self.limited = function, limited
        self.count = min(4, os.cpu_count() or 1) if count is None else count
        self.questions_per_worker = questions_per_worker
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._free: list[_Worker] = []
        self._all: list[_Worker] = []
        self._places = self.count
        self._closed = False

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers alive."""
        with self._changed:
            return [worker.process.pid for worker in self._all if worker.process.poll() is None]

    def ask(self, *arguments: Any, seconds: float) -> Any:
        """Call the function in a worker with JSON arguments and return its result.

        `seconds` limits the call itself; starting a worker and waiting for a free one do not count.
        """
        question = json.dumps([arguments, seconds]).encode() + b"\n"
        for again in (False, True):
            # If a worker is killed from outside, ask once more, in a new worker: the idle ones may have been killed too.
            # Never ask a third time: a question that crashes its worker would crash every worker.
            worker = self._take(fresh=again)
            try:
                reply = worker.answer(question, seconds)
            except TimeoutError:
                self._discard(worker)
                raise TimedOutError(f"no reply after {seconds:g} s") from None
            except (OSError, EOFError):
                self._discard(worker)
                continue
            except BaseException:
                # Interrupted between question and reply: the reply would look like the reply to the next question.
                self._discard(worker)
                raise
            self._return(worker)
            if "refused" in reply:
                raise RefusedError(reply["refused"])
            return reply["value"]
        raise DiedError(f"two workers ended in the middle of a question, the last by {worker.end()}")

    def _take(self, fresh: bool) -> "_Worker":
        with self._changed:
            while not self._free and self._places == 0 and not self._closed:
                self._changed.wait()
            if self._closed:
                raise DiedError("the workers have been closed")
            while self._free:
                worker = self._free.pop()
                if worker.process.poll() is None and not fresh:
                    return worker
                # Killed while it was idle: no question was lost.
                self._forget(worker)
            self._places -= 1
        try:
            worker = _Worker(self.function, self.limited)
        except BaseException:
            with self._changed:
                self._places += 1
                self._changed.notify()
            raise
        with self._changed:
            self._all.append(worker)
            if self._closed:
                # The pool was closed while the worker started: nothing else would end it.
                self._forget(worker)
                raise DiedError("the workers have been closed")
        return worker

    def _return(self, worker: "_Worker") -> None:
        if worker.answered >= self.questions_per_worker:
            # Caches and memory fragments of its libraries only grow.
            self._discard(worker)
            return
        with self._changed:
            self._free.append(worker)
            self._changed.notify()

    def _discard(self, worker: "_Worker") -> None:
        with self._changed:
            self._forget(worker)

    def _forget(self, worker: "_Worker") -> None:
        worker.kill()
        if worker in self._all:
            self._all.remove(worker)
            self._places += 1
        self._changed.notify()

    def close(self) -> None:
        """Kill all workers and wait for their end; questions still open raise DiedError."""
        with self._changed:
            self._closed = True
            for worker in self._all:
                worker.kill()
            self._all, self._free = [], []
            self._changed.notify_all()

    def _abandon(self) -> None:
        """In a forked child: close our copies of the parent's sockets and start with an empty pool."""
        for worker in self._all:
            worker.channel.close()
            worker.process.returncode = 0
        self._reset()


class _Worker:
    """One process and the socket to it. Only one thread at a time uses it."""

    def __init__(self, function: str, limited: bool) -> None:
        self.channel, other = socket.socketpair()
        self.received = b""
        self.answered = 0
        program = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from legato.workers import pool; pool.serve(sys.argv[2], sys.argv[3] == 'limited')"
        )
        environment = {name: value for name, value in os.environ.items() if name in ENVIRONMENT or not limited}
        output = subprocess.DEVNULL if limited else None
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-B", "-c", program, json.dumps(sys.path), function, "limited" if limited else "free"],
                stdin=other.fileno(),
                stdout=output,
                stderr=output,
                # One hash seed for all workers, so that libraries that depend on the order of a set give the same results.
                env=environment | {"PYTHONHASHSEED": "0"},
                # A Ctrl-C in the terminal must reach only the main process, which ends its workers itself.
                start_new_session=True,
            )
        try:
            ready = self._read_reply(time.monotonic() + START_SECONDS)
        except BaseException as error:
            self.kill()
            if isinstance(error, OSError | EOFError):
                raise DiedError(f"a worker for {function} did not start: {self.end()}") from None
            raise
        if "refused" in ready:
            self.kill()
            raise DiedError(f"a worker for {function} did not start: {ready['refused']}")

    def answer(self, question: bytes, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        self.channel.settimeout(seconds)
        self.channel.sendall(question)
        reply = self._read_reply(deadline)
        self.answered += 1
        return reply

    def _read_reply(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self.received:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self.channel.settimeout(remaining)
            piece = self.channel.recv(65536)
            if not piece:
                raise EOFError
            self.received += piece
        line, _, self.received = self.received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        """Kill the process and collect its exit status, so that no zombie stays."""
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def end(self) -> str:
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"


_POOLS: "weakref.WeakSet[Workers]" = weakref.WeakSet()
_SHARED: dict[str, Workers] = {}
_SHARED_LOCK = threading.Lock()


def shared(function: str, *, questions_per_worker: int = 1000) -> Workers:
    """The pool of this process for a function; created at the first call."""
    with _SHARED_LOCK:
        if function not in _SHARED:
            _SHARED[function] = Workers(function, questions_per_worker=questions_per_worker)
        return _SHARED[function]


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


def _after_fork() -> None:
    # A thread of the parent may have held any of these locks; it does not exist here to release them.
    global _SHARED_LOCK
    _SHARED_LOCK = threading.Lock()
    for pool in list(_POOLS):
        pool._abandon()


os.register_at_fork(after_in_child=_after_fork)


def serve(name: str, limited: bool = True) -> None:
    """The main loop of a worker: import the function, report success, then answer questions until the caller is gone."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    home, _, attribute = name.partition(":")
    try:
        module = import_module(home)
        function = getattr(module, attribute)
        # Do slow preparations before the first question, because its time is limited.
        getattr(module, "prepare", lambda: None)()
        if limited:
            _limit_memory_and_files()
        else:
            _end_with_the_caller()
    except Exception as error:
        _send(channel, {"refused": describe_error(error)})
        return
    _send(channel, {"ready": True})
    for line in channel.makefile("rb"):
        arguments, seconds = json.loads(line)
        if limited:
            _limit_cpu(seconds)
        try:
            reply = {"value": function(*arguments)}
            text = json.dumps(reply)
        except Exception as error:
            text = json.dumps({"refused": describe_error(error)})
        channel.sendall(text.encode() + b"\n")


def _send(channel: socket.socket, reply: dict[str, Any]) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")


def _end_with_the_caller() -> None:
    """Let the kernel end this worker when its caller ends; a CPU limit would count all threads of a large model."""
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(set_death_signal, signal.SIGKILL)


def _limit_memory_and_files() -> None:
    import resource

    for limit, value in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (allowed, hard))


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end this worker after about `seconds` of CPU time, in case the caller died and cannot kill it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(time.process_time() + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
