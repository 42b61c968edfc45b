"""Writes checkpoints while the run goes on: the run waits only until weights and state are copied to host memory.

Every rank writes its own files in a thread. When all have, the ranks meet and rank 0 gives the checkpoint its name, so a
checkpoint is whole or absent as ever. One checkpoint is written at a time.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legato.core.world import World
from legato.records.room import DiskFullError
from legato.training import checkpoint
from legato.training.checkpoint import Snapshot


@dataclass(slots=True, eq=False)
class _Pending:
    """A checkpoint that is being written."""

    folder: Path
    snapshot: Snapshot
    then: Callable[[], None]
    files: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def write(self) -> None:
        try:
            self.files = checkpoint.write_share(self.folder, self.snapshot)
        except BaseException as error:  # raised again by the main thread
            self.error = error


class Saver:
    """Writes one checkpoint after another. All ranks call each method together."""

    def __init__(self, world: World, *, background: bool) -> None:
        self.world, self.background = world, background
        self._pending: _Pending | None = None

    def save(self, folder: Path, snapshot: Snapshot, then: Callable[[], None]) -> None:
        """Write a checkpoint, or begin to; `then` is called once it has its name. After a DiskFullError, call it again."""
        self.complete()
        if not self.background:
            checkpoint.write(folder, snapshot, self.world)
            then()
            return
        pending = _Pending(folder, snapshot, then)
        rank = self.world.rank
        checkpoint.together(self.world, lambda: checkpoint.begin_writing(folder, snapshot) if rank == 0 else None)
        pending.thread = threading.Thread(target=pending.write, name="checkpoint", daemon=True)
        pending.thread.start()
        self._pending = pending

    def poll(self) -> None:
        """Complete the checkpoint that is being written if all ranks have written their files."""
        pending = self._pending
        if pending is None:
            return
        writing = pending.thread is not None and pending.thread.is_alive()
        if not self.world.agree(int(writing)):
            self.complete()

    def complete(self) -> None:
        """Wait until the checkpoint that is being written has its name.

        If its disk was full, raises DiskFullError; the next call writes it again.
        """
        pending = self._pending
        if pending is None:
            return
        if pending.thread is None:
            checkpoint.write(pending.folder, pending.snapshot, self.world)
        else:
            pending.thread.join()
            pending.thread = None

            def raise_error() -> None:
                if pending.error is not None:
                    raise pending.error

            try:
                checkpoint.together(self.world, raise_error)
                checkpoint.finish_writing(pending.folder, pending.files, self.world)
            except DiskFullError:
                checkpoint.give_up_writing(pending.folder, self.world)
                raise
            except BaseException:
                checkpoint.give_up_writing(pending.folder, self.world)
                self._pending = None
                raise
        self._pending = None
        pending.then()


def has_room_for_copies(needed: int, processes: int) -> bool:
    """Whether so many processes of this machine can each hold a copy of `needed` bytes in host memory at once."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return False
    return 1.2 * needed * processes < free
