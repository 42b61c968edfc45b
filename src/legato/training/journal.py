"""The journal of a run that samples ahead: complete groups, written before they are used.

    journal/000003-00000.groups     segment 3 of rank 0: frames, one after the other
        b"LGTO", length (8 bytes, little-endian), SHA-256 of the rest, a safetensors file of one group (`saved_groups.py`)

A checkpoint holds the groups that are complete and not used. The journal holds those that were completed later, so that a
killed run is resumed with the groups it had used, and asks only for those that were in flight. A checkpoint begins a new
segment; segments that no kept checkpoint needs are deleted. Files are only appended to, and flushed to disk before a group
is used. A frame that a crash has torn ends its segment: the groups from there on are asked for again.
"""

import hashlib
import os
import re
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from legato.records.lines import explain_os_errors
from legato.records.room import until_room
from legato.training.saved_groups import SavedGroup

_MAGIC = b"LGTO"
_HEADER = struct.Struct("<4sQ32s")
_NAME = re.compile(r"(\d{6,})-(\d{5,})\.groups")


class Journal:
    """The journal of one rank. The thread that samples writes; the main thread does everything else."""

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.number = 1 + max((number for number, _, _ in self._segments()), default=-1)
        """The segment that is being written."""
        self._length = 0
        """Its bytes in whole frames."""
        self._lock = threading.Lock()
        self._replay: dict[int, SavedGroup] | None = None
        self.notes: list[str] = []
        """What was wrong with the files, in words."""

    def write(self, groups: Sequence[SavedGroup]) -> None:
        """Append groups. They are on disk when this returns."""
        frames = b"".join(_frame(save(group.tensors())) for group in groups)
        with self._lock:
            until_room(lambda: self._append(frames))
            self._length += len(frames)

    def _append(self, frames: bytes) -> None:
        path = self._path(self.number)
        with explain_os_errors(path, "write"):
            self.folder.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            with path.open("ab") as file:
                file.truncate(self._length)  # a full disk may have taken a part of the last frames
                file.write(frames)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                _flush_folder(self.folder)

    def begin_segment(self) -> None:
        """Begin the next segment, since a checkpoint holds what was complete until now."""
        with self._lock:
            self.number, self._length = self.number + 1, 0

    def go_to_segment(self, number: int) -> None:
        """Write to this segment, which no rank has begun."""
        with self._lock:
            self.number, self._length = number, 0

    def prune(self, first: int) -> None:
        """Delete the segments before `first`; failing to delete is harmless."""
        self._delete(first)

    def clear(self) -> None:
        """Delete all segments: the run goes on otherwise than it did when they were written."""
        self._replay = None
        self.begin_segment()
        self._delete(self.number)

    def _delete(self, first: int) -> None:
        for number, rank, path in self._segments():
            if number < first and rank % self.ranks == self.rank:
                try:
                    path.unlink(missing_ok=True)
                except OSError:
                    continue

    def read(self) -> None:
        """Read the groups of all ranks, for the next `take_replay`."""
        self._replay = {}
        for _, _, path in self._segments():
            self._replay |= {group.number: group for group in self._read_segment(path)}

    def take_replay(self) -> dict[int, SavedGroup] | None:
        """The groups that `read` has found, by number, once; None if nothing was read: then none may be used."""
        replay, self._replay = self._replay, None
        return replay

    def _read_segment(self, path: Path) -> list[SavedGroup]:
        """The groups up to the first frame that is not whole."""
        with explain_os_errors(path, "read"):
            data = path.read_bytes()
        groups, place = [], 0
        while place < len(data):
            frame = _read_frame(data, place)
            if frame is None:
                break
            payload, place = frame
            try:
                groups.append(SavedGroup.read(load(payload)))
            except (SafetensorError, ValueError, LookupError, TypeError) as error:
                self.notes.append(f"{path}: a group cannot be read and is asked for again ({type(error).__name__})")
        if place < len(data) and len(data) - place >= _HEADER.size and _is_whole(data, place):
            self.notes.append(
                f"{path} is damaged after byte {place}: its SHA-256 differs; the groups from there on are asked for again"
            )
        return groups

    def _segments(self) -> list[tuple[int, int, Path]]:
        """(number, rank, path) of all segments, in the order in which they were written."""
        if not self.folder.is_dir():
            return []
        matches = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)) is not None]
        return sorted((int(match[1]), int(match[2]), path) for match, path in matches)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}-{self.rank:05d}.groups"


def _frame(payload: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, len(payload), hashlib.sha256(payload).digest()) + payload


def _is_whole(data: bytes, place: int) -> bool:
    """Whether as many bytes follow as the frame at this place says, or no frame begins there."""
    magic, length, _ = _HEADER.unpack_from(data, place)
    return bool(magic != _MAGIC or len(data) - place - _HEADER.size >= length)


def _read_frame(data: bytes, place: int) -> tuple[bytes, int] | None:
    """The payload of the frame that begins here, and where it ends; None if it is torn or damaged."""
    if len(data) - place < _HEADER.size or not _is_whole(data, place):
        return None
    magic, length, digest = _HEADER.unpack_from(data, place)
    begin = place + _HEADER.size
    payload = data[begin : begin + length]
    if magic != _MAGIC or hashlib.sha256(payload).digest() != digest:
        return None
    return payload, begin + length


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
