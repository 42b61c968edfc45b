"""One process per run directory: a second one is refused, a lock left by a dead one is taken over."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from legato.errors import InputError
from legato.records.directory import RunDirectory


@contextmanager
def locked(directory: RunDirectory) -> Iterator[None]:
    """The kernel holds the lock, so it goes with the process however that ends."""
    path = directory.path / ".lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{directory.path} is in use by another process; wait for it, or stop it first") from None
        yield
