"""Reads a file of lines while another process writes it. Each line is read once, when it is complete."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_GUARD = 4096
"""Bytes kept before the position. Lines may end alike (histogram counts), but not over this many bytes."""
_SLICE = 1 << 20
LONGEST = 1 << 21
"""Longest line in bytes. Longer ones (zeros after a power cut, say) count as damaged lines."""


def open_plain_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. OSError for others: a pipe would block and a device never ends."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a file")
    return file


@dataclass(slots=True)
class Tail:
    """Reading position in a file that grows, and that a resumed run may truncate."""

    path: Path
    position: int = 0
    """Bytes of whole lines read so far."""
    inode: int = 0
    before: bytes = b""
    """The bytes right before `position`. They differ in a file that was truncated and grew again."""

    def lines(self, most: int = _SLICE) -> tuple[bool, list[bytes]]:
        """Return whether the file was rewritten, and the next whole lines: about `most` bytes, or one longer line."""
        try:
            with open_plain_file(self.path) as file:
                rewritten = self._was_rewritten(file.fileno())
                file.seek(self.position)
                data = file.read(most)
                while data and b"\n" not in data and len(data) < LONGEST and (more := file.read(most)):
                    data += more
        except OSError:
            return False, []
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) >= LONGEST else b"")
        self.position += len(whole)
        self.before = (self.before + whole)[-_GUARD:]
        return rewritten, whole.splitlines()

    def _was_rewritten(self, descriptor: int) -> bool:
        status = os.fstat(descriptor)
        rewritten = False
        if self.position:
            present = os.pread(descriptor, len(self.before), self.position - len(self.before))
            rewritten = status.st_ino != self.inode or status.st_size < self.position or present != self.before
        self.inode = status.st_ino
        if rewritten:
            self.position, self.before = 0, b""
        return rewritten

    def size(self) -> int:
        """Return the size of the file in bytes; 0 if it does not exist."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def last_lines(path: Path, most: int) -> list[bytes]:
    """Return the whole lines among the last `most` bytes."""
    try:
        with open_plain_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError:
        return []
    if size > most:
        data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
    return data[: data.rfind(b"\n") + 1].splitlines()


def spread_lines(path: Path, count: int) -> list[bytes]:
    """Return about `count` whole lines spread evenly over the file, with the last one: an overview of a long file."""
    lines, reached = [], -1
    try:
        with open_plain_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            for number in range(count):
                file.seek(number * size // count)
                if number:
                    file.readline(LONGEST)
                if file.tell() <= reached:
                    continue
                line = file.readline(LONGEST)
                reached = file.tell() - 1
                if line.endswith(b"\n"):
                    lines.append(line)
    except OSError:
        return []
    return lines + [line for line in last_lines(path, 1 << 18)[-1:] if not lines or line + b"\n" != lines[-1]]
