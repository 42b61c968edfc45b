"""Standard output and standard error that never end a command.

A reader that leaves (`| head -3`), a full disk and a closed descriptor are errors of the log and not of the work. The first
error is kept in `lost`; whatever is printed later is dropped.
"""

import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from legato.pages.legible import legible
from legato.run.watcher import lost_output


class _Descriptor(io.RawIOBase):
    """The bytes of a stream. After the first error they go to the null device, also those that other code writes."""

    def __init__(self, number: int, lost: OSError | None) -> None:
        self._number, self.lost = number, lost

    def write(self, data: Any, /) -> int:
        while True:
            try:
                return os.write(self._number, data)
            except BlockingIOError:
                select.select([], [self._number], [])
            except OSError as error:
                self.lost = error
                _point_at_null_device(self._number)
                return len(memoryview(data).cast("B"))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)


class SafeStream(io.TextIOWrapper):
    """A text stream that never raises. Characters that its encoding lacks are escaped."""

    def __init__(self, number: int, encoding: str, lost: OSError | None = None) -> None:
        self._descriptor = _Descriptor(number, lost)
        super().__init__(
            io.BufferedWriter(self._descriptor),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=self._descriptor.isatty() or number == 2,
        )

    @property
    def lost(self) -> OSError | None:
        """The first error; None while everything was written."""
        return self._descriptor.lost

    def close(self) -> None:
        """Flush only: a reward that closes the standard output must not end the run that prints to it."""
        self.flush()


@contextmanager
def safe_output() -> Iterator[None]:
    """Within the block, sys.stdout and sys.stderr never raise. Streams without a descriptor (tests, notebooks) stay."""
    closed: dict[int, OSError] = {}
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError as error:
            # Else the next file that is opened gets this number, and what is printed would be written into it.
            closed[number] = error
            _point_at_null_device(number)
    with ExitStack() as undo:
        for name, number in (("stdout", 1), ("stderr", 2)):
            before = getattr(sys, name)
            if before is None:
                encoding = "utf-8"
            elif isinstance(before, io.TextIOWrapper) and _descriptor_of(before) == number:
                encoding = before.encoding
                with suppress(OSError, ValueError):
                    before.flush()
            else:
                continue
            stream = SafeStream(number, encoding, closed.get(number))
            setattr(sys, name, stream)
            undo.callback(setattr, sys, name, before)
            undo.callback(stream.flush)
        yield


def say_on(console: Console) -> Callable[[str], None]:
    """A function that prints one line of plain text, and raises OSError once the console's stream is lost."""

    def say(text: str) -> None:
        console.print(Text(legible(text, one_line=True)), soft_wrap=True)
        lost = lost_output(console.file)
        if lost is not None:
            raise lost

    return say


def _descriptor_of(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _point_at_null_device(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
