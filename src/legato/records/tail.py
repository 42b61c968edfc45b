"""A file of lines that another process is writing: each line is read once, and only when it is whole."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_GUARD = 4096
"""Bytes: the end of a line may be the same in every line (counts of a histogram), all of it is not."""
_SLICE = 1 << 20
LONGEST = 1 << 21
"""Bytes of a line; what is longer is none of ours (zeros after a power cut, say), and counts as lines that are damaged."""


def opened(path: Path) -> BinaryIO:
    """A plain file for reading; OSError for anything else, since a pipe would be waited for and a device never ends."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a file")
    return file


@dataclass(slots=True)
class Tail:
    """Where reading has come to in a file that grows, and now and then is cut back by a resumed run."""

    path: Path
    position: int = 0
    """Bytes of whole lines read so far."""
    inode: int = 0
    before: bytes = b""
    """What stands right before `position`: a file that was cut back and grew again has something else there."""

    def lines(self, most: int = _SLICE) -> tuple[bool, list[bytes]]:
        """Whether the file was begun again, and the next whole lines: about `most` bytes of them, or one longer line."""
        try:
            with opened(self.path) as file:
                again = self._begun_again(file.fileno())
                file.seek(self.position)
                data = file.read(most)
                while data and b"\n" not in data and len(data) < LONGEST and (more := file.read(most)):
                    data += more
        except OSError:
            return False, []
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) >= LONGEST else b"")
        self.position += len(whole)
        self.before = (self.before + whole)[-_GUARD:]
        return again, whole.splitlines()

    def _begun_again(self, descriptor: int) -> bool:
        found = os.fstat(descriptor)
        again = False
        if self.position:
            stands = os.pread(descriptor, len(self.before), self.position - len(self.before))
            again = found.st_ino != self.inode or found.st_size < self.position or stands != self.before
        self.inode = found.st_ino
        if again:
            self.position, self.before = 0, b""
        return again

    def size(self) -> int:
        """Bytes in the file now; 0 where there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def last_lines(path: Path, most: int) -> list[bytes]:
    """The whole lines among the last `most` bytes."""
    try:
        with opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError:
        return []
    if size > most:
        data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
    return data[: data.rfind(b"\n") + 1].splitlines()


def spread_lines(path: Path, count: int) -> list[bytes]:
    """Whole lines at about equal distances through the file, the last among them: a first look at a long one."""
    found, reached = [], -1
    try:
        with opened(path) as file:
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
                    found.append(line)
    except OSError:
        return []
    return found + [line for line in last_lines(path, 1 << 18)[-1:] if not found or line + b"\n" != found[-1]]
