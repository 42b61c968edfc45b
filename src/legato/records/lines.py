"""JSON-lines files that are appended to and sometimes truncated. Standard library only.

Numbers that are not finite are stored as null, since JSON has no NaN. A line counts once it is whole; a last line torn by a
crash is ignored.
"""

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
from legato.records.room import DiskFullError, is_full, os_error_of, reason, until_room


class RunDirectoryError(OSError, InputError):
    """The run directory cannot be written or read. Also an InputError, so that the command line prints one line."""


class RunDirectoryFullError(RunDirectoryError, DiskFullError):
    """The disk of the run directory has no room."""


@dataclass(frozen=True, slots=True)
class Lines:
    """A JSON-lines file by its path. A file that does not exist counts as empty."""

    path: Path
    writes: bool = True
    """Whether anything is written; False for the ranks of a run that leave its records to rank 0."""

    def append(self, record: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append one record as a line. With `sync` the line is on disk when this returns."""
        if self.writes:
            line = encode_line(record)
            until_room(lambda: self._append(line, sync))

    def _append(self, line: bytes, sync: bool) -> None:
        with explain_os_errors(self.path, "write"), self.path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end and not _ends_a_line(file, end):
                # A line torn by a crash or a full disk would swallow the one that follows it.
                file.truncate(_end_of_whole_lines(self.path.read_bytes()))
            file.write(line)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Read all records. A torn last line is skipped; a torn line before it means that the file is damaged."""
        records = []
        for number, line in enumerate(self.after(0).splitlines(), start=1):
            record = parse_line(line)
            if record is None:
                shown = line[:60].decode(errors="replace")
                raise RunDirectoryError(f"{self.path}, line {number}: {shown!r} is not a JSON object; the file is damaged")
            records.append(record)
        return records

    def readable(self) -> list[dict[str, Any]]:
        """Read the records of a file that may be damaged: lines that are not JSON objects are left out."""
        if not self.path.is_file():
            return []
        with explain_os_errors(self.path, "read"):
            lines = self.path.read_bytes().splitlines()
        return [record for line in lines if (record := parse_line(line)) is not None]

    def position(self) -> int:
        """Return the number of bytes in whole lines."""
        return len(self.after(0))

    def after(self, position: int) -> bytes:
        """Return the whole lines after a byte position."""
        if not self.path.exists():
            return b""
        with explain_os_errors(self.path, "read"):
            data = self.path.read_bytes()
        return data[position : _end_of_whole_lines(data)]

    def truncate(self, position: int) -> None:
        """Cut off everything after byte `position`: a resumed run writes those lines again."""
        if not self.writes:
            return
        here = self.position()
        if not 0 <= position <= here:
            raise InputError(f"expected a position from 0 to {here} (whole lines), got {position} ({self.path})")
        if not self.path.exists():
            return
        with explain_os_errors(self.path, "write"), self.path.open("rb+") as file:
            if position:
                file.seek(position - 1)
                if file.read(1) != b"\n":
                    raise InputError(f"{self.path}: position {position} is inside a line; the file was altered")
            file.truncate(position)
            os.fsync(file.fileno())


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write records to a gzip file of JSON lines, atomically. The same records give the same bytes."""
    lines = [json.dumps(finite(record), allow_nan=False).encode() + b"\n" for record in records]

    def write() -> None:
        with explain_os_errors(path, "write"), atomic_replace(path) as partial, partial.open("wb") as raw:  # noqa: SIM117
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as file:
                file.writelines(lines)

    until_room(write)
    return path


def finite(value: Any) -> Any:
    """Copy a value for JSON, with None in place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def encode_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON."""
    return json.dumps(finite(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON object. None if the line is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def explain_os_errors(path: Path, verb: str) -> Iterator[None]:
    """Raise errors of the disk as RunDirectoryError: `cannot <verb> <path>: <reason>`."""
    try:
        yield
    except RunDirectoryError:
        raise
    except Exception as error:
        cause = os_error_of(error)
        if cause is None:
            raise
        kind = RunDirectoryFullError if is_full(cause) else RunDirectoryError
        raise kind(f"cannot {verb} {path}: {reason(cause)}") from error


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then rename it to `path`: the file is whole or absent."""
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


def _end_of_whole_lines(data: bytes) -> int:
    """Return the byte where the last whole line ends. A last line that does not parse is torn, newline or not."""
    end = data.rfind(b"\n") + 1
    start = data.rfind(b"\n", 0, max(0, end - 1)) + 1
    return start if end == len(data) and parse_line(data[start:end]) is None else end
