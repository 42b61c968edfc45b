"""Files of JSON, an object a line, that are appended to and now and then cut back. Standard library only.

A number that is not finite is null: JSON has no NaN. A line counts once it is whole; what a crash left of the last is none.
"""

import errno
import gzip
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.errors import InputError


class RunDirectoryError(OSError, InputError):
    """The run directory cannot be written or read. Also a ValueError, so that the door says it in one line."""


@dataclass(frozen=True, slots=True)
class Lines:
    """One such file by its path; one that is not there is empty."""

    path: Path

    def append(self, record: Mapping[str, Any], *, sync: bool = False) -> None:
        """One line at the end; with `sync` it is on the disk when this returns."""
        line = json.dumps(finite(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with told(self.path, "write"), self.path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end and not _ends_a_line(file, end):
                # A line torn by a crash or a full disk would swallow the one that follows it.
                file.truncate(_whole(self.path.read_bytes()))
            file.write(line)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All records. A torn last line is not there yet; a torn line before it means the file is damaged."""
        records = []
        for number, line in enumerate(self.after(0).splitlines(), start=1):
            record = parsed(line)
            if record is None:
                shown = line[:60].decode(errors="replace")
                raise RunDirectoryError(f"{self.path}, line {number}: {shown!r} is not a JSON object; the file is damaged")
            records.append(record)
        return records

    def position(self) -> int:
        """Bytes of whole lines so far."""
        return len(self.after(0))

    def after(self, position: int) -> bytes:
        """The whole lines after a position."""
        if not self.path.exists():
            return b""
        with told(self.path, "read"):
            data = self.path.read_bytes()
        return data[position : _whole(data)]

    def truncate(self, position: int) -> None:
        """Forget what was written after `position`: a resumed run writes those lines again."""
        here = self.position()
        if not 0 <= position <= here:
            raise InputError(f"{self.path}: position {position} is asked for; 0 to {here} (whole lines) are allowed")
        if not self.path.exists():
            return
        with told(self.path, "write"), self.path.open("rb+") as file:
            if position:
                file.seek(position - 1)
                if file.read(1) != b"\n":
                    raise InputError(f"{self.path}: position {position} is inside a line; the file was altered")
            file.truncate(position)
            os.fsync(file.fileno())


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """A compressed file of lines, written at once. The same records give the same bytes."""
    with told(path, "write"), beside(path) as partial, partial.open("wb") as raw:  # noqa: SIM117
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as file:
            for record in records:
                file.write(json.dumps(finite(record), allow_nan=False).encode() + b"\n")
    return path


def finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def told(path: Path, verb: str) -> Iterator[None]:
    """What the system refuses, as a sentence."""
    try:
        yield
    except RunDirectoryError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"cannot {verb} {path}: {reason(error)}") from error


def reason(error: OSError) -> str:
    """Why the system refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; what was written before is whole, and after making room the run can be resumed"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "the folder is not writable or not readable for this user"
    return error.strerror or str(error)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Write beside and rename, so that a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _ends_a_line(file: Any, end: int) -> bool:
    file.seek(end - 1)
    return bool(file.read(1) == b"\n")


def _whole(data: bytes) -> int:
    """Where the last whole line ends. The last line is torn if it does not parse, even with a newline."""
    end = data.rfind(b"\n") + 1
    start = data.rfind(b"\n", 0, max(0, end - 1)) + 1
    return start if end == len(data) and parsed(data[start:end]) is None else end
