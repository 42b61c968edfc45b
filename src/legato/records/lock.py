"""A lock that admits one process per run directory. The lock of a dead process is free."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from legato.errors import InputError
from legato.records.directory import RunDirectory
from legato.records.lines import explain_os_errors


@contextmanager
def hold_lock(directory: RunDirectory) -> Iterator[None]:
    """Hold the lock of a run directory during the block. The kernel frees it when the process ends, however it ends."""
    path = directory.path / ".lock"
    with explain_os_errors(path, "write"):
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{directory.path} is in use by another process; wait for it, or stop it first") from None
        yield
