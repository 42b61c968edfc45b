"""Runs a command until it ends or the process that started this one is gone: a server never outlives its run.

    python leash.py COMMAND ...

The command gets a process group of its own. It is ended (SIGTERM, then SIGKILL) with everything in the group when the input
of this program closes, when its parent dies, even by SIGKILL, or on SIGTERM. Standard library only: this file is a program.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.3


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the command and its children. Children may outlive the command itself, so the group is always killed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(command: list[str]) -> int:
    """Run the command; returns its exit status."""
    parent = os.getppid()
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not signals and os.getppid() == parent:
        try:
            ready, _, _ = select.select([0], [], [], _POLL_SECONDS)
        except InterruptedError:
            continue
        if ready and not os.read(0, 4096):
            break
    _end_group(process)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
