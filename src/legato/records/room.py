"""Full disks: which errors mean one, and how a write waits until there is room again. Standard library only."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

from legato.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_DISKS = (*_FULL, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE)
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
"""How libraries in Rust (safetensors, tokenizers), and shutil, write the number of an error of the operating system."""

Result = TypeVar("Result")


class DiskFullError(InputError):
    """The disk has no room for a file; nothing half-written is left."""


@runtime_checkable
class Waiter(Protocol):
    """Decides what happens while a disk is full."""

    def wait(self, error: DiskFullError) -> None:
        """Return when the write is worth another attempt, or raise."""

    def succeed(self) -> None:
        """A write that had to wait has succeeded."""


_waiters: list[Waiter] = []


@contextmanager
def waiting_for_room(waiter: Waiter) -> Iterator[None]:
    """Within the block, writes that find the disk full wait with `waiter` and try again."""
    _waiters.append(waiter)
    try:
        yield
    finally:
        _waiters.pop()


def until_room(write: Callable[[], Result]) -> Result:
    """Call `write`, which can be repeated, until it raises no DiskFullError; at once if nobody waits for room."""
    waited = False
    while True:
        try:
            result = write()
        except DiskFullError as error:
            if not _waiters:
                raise
            _waiters[-1].wait(error)
            waited = True
        else:
            if waited:
                _waiters[-1].succeed()
            return result


def os_error_of(error: BaseException) -> OSError | None:
    """The error of the operating system that an exception is or reports; None if it is of another kind."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    match = _NUMBER.search(str(error))
    if match is None:
        return error if isinstance(error, OSError) else None
    number = int(match[1] or match[2])
    return OSError(number, os.strerror(number))


def is_full(error: OSError | None) -> bool:
    """Whether an error means that a disk or a quota has no room."""
    return error is not None and error.errno in _FULL


def is_of_the_disk(error: OSError) -> bool:
    """Whether an error comes from the user's disk or from a path that the user chose, and not from a fault of ours."""
    return error.errno in _OF_DISKS or (error.errno in _OF_PATHS and error.filename is not None)


def reason(error: OSError) -> str:
    """Return why the operating system refused, in words."""
    if is_full(error):
        return "the disk is full; what was written before is whole"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "the folder is not writable or not readable for this user"
    return error.strerror or str(error)
