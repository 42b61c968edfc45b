"""Kills for memory: by the system itself in a group of processes with a limit, or by a watcher that stands for it."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT_BYTES = 2 * 2**30
"""A small run needs about 0.6 GiB."""
_PLACES = (
    (Path("/sys/fs/cgroup"), "cgroup.controllers", "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.limit_in_bytes"),
)
"""Where groups are made, a file that shows it, and the file of the limit: version 2 of control groups, and version 1."""


def run_until_killed(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str | None:
    """Run a command that allocates without end. Returns who killed it, or None if it ended otherwise or in vain."""
    group = make_group()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(environment),
        preexec_fn=None if group is None else lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
    )
    deadline, by_watcher = time.monotonic() + seconds, False
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if group is None and resident_bytes(process.pid) > LIMIT_BYTES:
                process.send_signal(signal.SIGKILL)
                by_watcher = True
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
        if group is not None:
            remove_group(group)
    if process.returncode != -signal.SIGKILL or time.monotonic() >= deadline:
        return None
    return "a watcher that stands for the system" if by_watcher else "the system"


def make_group() -> Path | None:
    """A new group of processes with a limit of memory; None where groups cannot be made."""
    for parent, sign, limit in _PLACES:
        if not (parent / sign).is_file():
            continue
        try:
            group = Path(tempfile.mkdtemp(prefix="legato-trust-", dir=parent))
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT_BYTES))
            return group
        except OSError:
            group.rmdir()
    return None


def remove_group(group: Path) -> None:
    """Remove a group; small helpers of the killed process end a moment after it."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)


def resident_bytes(process: int) -> int:
    """How much memory a process holds; 0 once it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
