"""A lock that admits one process per run directory. The lock of a dead process is free."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from legato.errors import InputError
from legato.records.directory import RunDirectory
from legato.records.lines import explain_os_errors


@contextmanager
def hold_lock(directory: RunDirectory) -> Iterator[None]:
    """Hold the lock of a run directory during the block. The kernel frees it when the process ends, however it ends.

    Both the folder and the file .lock are locked. A deleted .lock would admit a second process; the folder itself cannot be
    deleted without the run. The file stays, since older versions and file systems without locks on folders need it.
    """
    with (
        _locked(directory.path, os.O_RDONLY, directory),
        _locked(directory.path / ".lock", os.O_RDWR | os.O_CREAT, directory),
    ):
        yield


@contextmanager
def _locked(path: Path, flags: int, directory: RunDirectory) -> Iterator[None]:
    with explain_os_errors(path, "lock"):
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # NFS refuses locks on what is not open for writing, and so on every folder.
            if path != directory.path or error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InputError(f"{directory.path} is in use by another process; wait for it, or stop it first") from None
        yield
    finally:
        os.close(descriptor)
