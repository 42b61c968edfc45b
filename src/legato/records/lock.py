"""A lock that admits one process per run directory. The lock of a dead process is free."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from legato.errors import InputError
from legato.records.directory import RunDirectory
from legato.records.lines import explain_os_errors

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""How the kernel says that another process holds a lock."""
_TRIES = 20
_SECONDS_BETWEEN_TRIES = 0.005


@contextmanager
def hold_lock(directory: RunDirectory) -> Iterator[None]:
    """Hold the lock of a run directory during the block. The kernel frees it when the process ends, however it ends.

    Both the folder and the file .lock are locked. A deleted .lock would admit a second process; the folder itself cannot be
    deleted without the run. The file stays, since older versions and file systems without locks on folders need it.
    """
    with (
        _hold_lock(directory.path, os.O_RDONLY, directory),
        _hold_lock(directory.path / ".lock", os.O_RDWR | os.O_CREAT, directory),
    ):
        yield


@contextmanager
def _hold_lock(path: Path, flags: int, directory: RunDirectory) -> Iterator[None]:
    with explain_os_errors(path, "lock"):
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        try:
            _take(descriptor)
        except OSError as error:
            # NFS refuses locks on what is not open for writing, and so on every folder.
            if path != directory.path or error.errno in _HELD:
                raise InputError(f"{directory.path} is in use by another process; wait for it, or stop it first") from None
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    """Take the lock; a few tries, since `is_locked` of another process holds it for a moment."""
    for attempt in range(_TRIES):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD or attempt == _TRIES - 1:
                raise
            time.sleep(_SECONDS_BETWEEN_TRIES)
    return None


def is_locked(path: Path) -> bool | None:
    """Whether a process works on a run directory: trains it, or resumes it. None if the file system does not tell."""
    answers = [_is_held(each) for each in (path / ".lock", path)]
    return True if True in answers else None if answers == [None, None] else False


def _is_held(path: Path) -> bool | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return True if error.errno in _HELD else None
    finally:
        os.close(descriptor)
