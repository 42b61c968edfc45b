"""A small process that ends this one if code of the user's holds the interpreter's lock and never returns.

While the lock is held no line of Python runs in this process: neither a signal handler nor the thread that watches over the
user's code (`user_code.py`). That thread therefore sends a sign of life every second. If the signs stop, the guardian reads
the signals that arrive, which the C part of Python still writes to a pipe. It kills the process

- when its time is over after a first signal, or at once after a second SIGINT or SIGTERM,
- when no sign of life has come for the longest time that a call may take.

Nothing can be saved then: the last checkpoint stays. This file is also the program of the guardian, so it imports nothing
but the standard library.
"""

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

_QUIET_SECONDS = 2.0
"""Without a sign of life for so long, the lock is held."""
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_URGENT = (signal.SIGINT, signal.SIGTERM)


class Guardian:
    """The process, and the pipe that the C part of Python writes signals to (`signal.set_wakeup_fd`)."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.arrivals, self.arrived = os.pipe()
        os.set_blocking(self.arrivals, False)
        os.set_blocking(self.arrived, False)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", __file__, str(self.owner), str(self.arrivals)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=(self.arrivals,),
            # Signals to the process group, as of Ctrl-C, must not reach it.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    def is_here(self) -> bool:
        """Whether the process is alive and belongs to this process, not to its parent."""
        return os.getpid() == self.owner and self.process.poll() is None

    def expect(self, name: str, silence: float | None, grace: float) -> None:
        """A sign of life. The next one may take `silence` seconds (None: for ever), and `grace` seconds after a signal."""
        self._write(f"{'inf' if silence is None else silence} {grace} {name.splitlines()[0][:200]}\n")

    def rest(self) -> None:
        """No sign of life is expected until the next `expect`."""
        self._write("\n")

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # killed: the run goes on without it
            self.process.stdin.write(line.encode(errors="replace"))

    def close(self) -> None:
        """End the process. It is killed: the end of its input would not come while a forked child holds the pipe open."""
        if os.getpid() == self.owner:
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                self.process.kill()
                self.process.communicate(timeout=10)

    def leave(self) -> None:
        """In a forked child: close the pipe to the guardian, which watches over the parent only."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


_started: list[Guardian] = []
_lock = threading.Lock()


def guardian() -> Guardian | None:
    """The guardian of this process, started at the first call; None where it is not known how to watch a process."""
    if not sys.platform.startswith("linux"):
        return None
    with _lock:
        if _started and not _started[-1].is_here():
            _started.clear()
        if not _started:
            _started.append(Guardian())
            atexit.register(_started[-1].close)
        return _started[-1]


def _leave_all() -> None:
    for each in _started:
        each.leave()


os.register_at_fork(after_in_child=_leave_all)


def _watch(owner: int, arrivals: int) -> None:
    """The program of the guardian."""
    for number in (*_ENDING, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # batch systems signal every process of a job
    last, first_signal_at = time.monotonic(), 0.0
    received: list[int] = []
    expected: tuple[float, float, str] | None = None
    unread = b""
    while os.getppid() == owner:
        if select.select([0], [], [], 0.2)[0]:
            piece = os.read(0, 65536)
            if not piece:
                return
            *lines, unread = (unread + piece).split(b"\n")
            if lines:
                fields = lines[-1].decode(errors="replace").split(" ", 2)
                expected = (float(fields[0]), float(fields[1]), fields[2]) if len(fields) == 3 else None
            last, received = time.monotonic(), []
            continue
        now = time.monotonic()
        if expected is None or now - last < _QUIET_SECONDS:
            continue
        if _is_stopped(owner):
            last = now
            continue
        silence, grace, name = expected
        new = _read_signals(arrivals)
        if new and not received:
            first_signal_at = now
        received += new
        twice = sum(number in _URGENT for number in received) > 1
        if twice or (received and now - first_signal_at >= grace) or now - last >= silence:
            why = f"{signal.Signals(received[0]).name} came" if received else f"it was given {silence:.0f} s"
            _kill(owner, f"{name} holds the interpreter's lock and does not return ({why})")
            return


def _read_signals(arrivals: int) -> list[int]:
    """The ending signals that have arrived. Their handlers run later all the same, should the lock become free."""
    try:
        return [number for number in os.read(arrivals, 4096) if number in _ENDING]
    except OSError:
        return []


def _is_stopped(process: int) -> bool:
    """Whether the process is stopped, by Ctrl-Z or by a debugger."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _kill(process: int, reason: str) -> None:
    if os.getppid() != process:
        return
    print(
        f"legato: {reason}: the process is killed, its last checkpoint stays; run such code in a process of its own with"
        " reward.separate_process = true",
        file=sys.stderr,
        flush=True,
    )
    os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]))
