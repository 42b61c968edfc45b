"""Each rank's watch over the others: a thread that tells them it is alive, and finds ranks that are gone or hang.

Every second a rank writes a beat to the store of torchrun: a counter, its process, and in which exchange it waits. Ranks 0
and 1 read the beats of all, so that the loss of either is noticed. A rank is gone if its process is (on the same machine),
or if its beat has not changed for `_SILENT_SECONDS`. A rank hangs if others have waited for it in an exchange for longer
than the deadline: then all ranks write down what each of their threads is doing. All ranks run through the same exchanges,
so that those which have begun fewer are late. A rank that computes waits for nobody, however long.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from legato.errors import LOST_RANK

_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 15.0
"""How long a rank on another machine may be silent. Together with the rest below 30 s."""
_GRACE_SECONDS = 5.0
"""How long the main thread of a rank has to end by itself after a loss, before the process is ended."""
_STACK_SECONDS = 3.0
_STORE_LOST = "the store of the ranks does not answer: torchrun or rank 0 is gone"


@runtime_checkable
class Store(Protocol):
    """The part of torch's stores that a watch uses. Values are bytes."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def check(self, keys: list[str]) -> bool: ...


class Watch:
    """The watch of one rank. Use it as a context."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        deadline: float,
        say: Callable[[str], None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self.store, self.rank, self.size, self.deadline = store, rank, size, deadline
        self._say, self._leave = say, leave
        self.folder: Path | None = None
        """Where the stacks of a hanging run are written; None: to the standard error."""
        self._beats = 0
        self._operations = 0
        self._waits_in: str | None = None
        self._waits_since = 0.0
        self._paused: str | None = None
        self._state = "running"
        self._closed = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        self._verdict: str | None = None
        """Why the run ends: which rank is gone or hangs."""
        self._wrote_stacks = False
        self._ends_itself = False
        """Whether this rank has failed and ended the others."""
        self._thread = threading.Thread(target=self._run, name="watch over ranks", daemon=True)

    def __enter__(self) -> "Watch":
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._state = "done"
        self._closed.set()
        self._thread.join(timeout=2 * _BEAT_SECONDS)
        with suppress(Exception):  # the store may be gone with its process
            self._beat()

    # What the rank is doing (called by its main thread)

    def begin(self, operation: str) -> None:
        self._operations += 1
        self._waits_in, self._waits_since = operation, time.monotonic()

    def end(self) -> None:
        self._waits_in = None

    def pause(self, reason: str | None) -> None:
        """The rank waits for a person, or for room on a disk, and is not overdue; None: it goes on."""
        self._paused = reason

    def explain_loss(self) -> str | None:
        """Which rank is gone, after waiting for the beats to tell; None if they do not."""
        end = time.monotonic() + _SILENT_SECONDS + 2 * _BEAT_SECONDS
        while self._verdict is None and time.monotonic() < end:
            with suppress(Exception):
                if self.store.check(["verdict"]):
                    self._verdict = self.store.get("verdict").decode()
                elif (verdict := self._find_loss(self._read_beats(), time.monotonic())) is not None:
                    self._verdict = verdict
                    self.store.set("verdict", verdict)
            time.sleep(0.2)
        return self._verdict

    def end_all(self, reason: str) -> None:
        """End the other ranks with this reason. This one ends by itself, with an exit code of its own."""
        self._ends_itself = True
        with suppress(Exception):  # the store may be gone with its process
            self.store.set("verdict", reason)

    # The thread

    def _run(self) -> None:
        failures = 0
        while not self._closed.wait(_BEAT_SECONDS):
            try:
                self._beat()
                self._obey()
                if (
                    not self._ends_itself
                    and self.rank in (0, 1)
                    and (verdict := self._look_at_others(time.monotonic())) is not None
                ):
                    self._end(self._agree_on(verdict))
                failures = 0
            except Exception:
                # The store lives in torchrun, or in rank 0 where there is no torchrun.
                failures += 1
                if failures >= 5 and not self._closed.is_set():
                    self._end(_STORE_LOST)

    def _beat(self) -> None:
        self._beats += 1
        waited = time.monotonic() - self._waits_since if self._waits_in is not None else 0.0
        beat = {
            "beats": self._beats,
            "operations": self._operations,
            "waits": self._waits_in is not None,
            "operation": self._waits_in,
            "seconds": waited,
            "paused": self._paused,
            "state": self._state,
            "process": os.getpid(),
            "host": socket.gethostname(),
        }
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _look_at_others(self, now: float) -> str | None:
        """Which rank is gone or hangs; None if none is."""
        beats = self._read_beats()
        verdict = self._find_loss(beats, now)
        # Once a rank has asked for stacks, it reports.
        late = find_late_ranks(beats, self.deadline) if verdict is None and not self._wrote_stacks else []
        # Rank 0 reports, unless it is the one that hangs.
        reporter = 1 if 0 in late and 1 not in late else 0
        return self._report_hang(late, beats) if late and self.rank == reporter else verdict

    def _read_beats(self) -> list[dict[str, Any]]:
        """The last beat of every rank; empty while some ranks are starting."""
        keys = [f"beat/{rank}" for rank in range(self.size)]
        return [json.loads(value) for value in self.store.multi_get(keys)] if self.store.check(keys) else []

    def _find_loss(self, beats: Sequence[Mapping[str, Any]], now: float) -> str | None:
        """Which rank is gone; None if all are there."""
        for rank, beat in enumerate(beats):
            if rank == self.rank or beat["state"] == "done":
                continue
            before = self._seen.get(rank)
            if before is None or before[0] != beat["beats"]:
                self._seen[rank] = before = (beat["beats"], now)
            if _is_gone(beat) or now - before[1] > _SILENT_SECONDS:
                where = f"process {beat['process']} on {beat['host']}"
                return f"rank {rank} ({where}) is gone: it was killed, or its machine was"
        return None

    def _report_hang(self, late: Sequence[int], beats: Sequence[Mapping[str, Any]]) -> str:
        """Ask all ranks for their stacks and write them down; which ranks hang."""
        self.store.set("stacks", "wanted")
        self._obey()
        self._keep_beating(_STACK_SECONDS)
        stacks = []
        for rank in range(self.size):
            key = f"stack/{rank}"
            stack = self.store.get(key).decode() if self.store.check([key]) else "(no answer)"
            stacks.append(f"rank {rank}, process {beats[rank]['process']} on {beats[rank]['host']}\n{stack}")
        text = "\n\n".join(stacks)
        where = "below"
        if self.folder is not None:
            path = self.folder / "stacks.txt"
            with suppress(OSError):
                path.write_text(text, encoding="utf-8")
                where = f"in {path}"
        if where == "below":
            print(text, file=sys.stderr, flush=True)
        if len(late) == self.size:
            doing = beats[self.rank]["operation"] or "an exchange"
            reason = f"all ranks hang: one of them, or the connection, holds up {doing}; none has gone on"
        else:
            ranks = f"rank {late[0]} hangs" if len(late) == 1 else f"ranks {', '.join(map(str, late))} hang"
            reason = f"{ranks}: the others have waited"
        return (
            f"{reason} for more than {self.deadline:g} s (training.rank_deadline_seconds); what every thread was doing"
            f" stands {where}"
        )

    def _obey(self) -> None:
        """Write the stacks, or end, if a rank asks for it."""
        if not self._wrote_stacks and self.store.check(["stacks"]):
            self._wrote_stacks = True
            self.store.set(f"stack/{self.rank}", describe_threads())
        if not self._ends_itself and self.store.check(["verdict"]):
            self._end(self.store.get("verdict").decode())

    def _agree_on(self, verdict: str) -> str:
        """The verdict that ends the run: this one, unless another rank has given its own meanwhile."""
        if self.store.check(["verdict"]):
            return self.store.get("verdict").decode()
        self.store.set("verdict", verdict)
        return verdict

    def _keep_beating(self, seconds: float) -> bool:
        """Wait for so long; others see that this rank is there, and where. True as soon as the watch is closed."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with suppress(Exception):  # the store may be gone with its process
                self._beat()
            if self._closed.wait(min(_BEAT_SECONDS, left)):
                return True
        return self._closed.is_set()

    def _end(self, verdict: str) -> None:
        """Give the main thread some time to end, then end the process: it may wait for a rank that is gone."""
        self._verdict = verdict
        if self._keep_beating(_GRACE_SECONDS):
            return
        if self._speaks(verdict):
            self._say(f"{verdict}; all ranks end")
        self._leave(LOST_RANK)

    def _speaks(self, verdict: str) -> bool:
        """Whether this rank shows the verdict: rank 0, rank 1 if that one is gone, all if it cannot be told who is left."""
        if verdict == _STORE_LOST:
            return True
        # A rank that hangs still shows it: the watch has a thread of its own.
        return self.rank == (1 if verdict.startswith("rank 0 (") else 0)


def find_late_ranks(beats: Sequence[Mapping[str, Any]], deadline: float) -> list[int]:
    """The ranks for which others have waited longer than the deadline; empty while none has, or where one is paused.

    Those that wait for others are the ones that have begun the most exchanges. A rank behind them may have waited for long
    in an exchange that is over by now. All ranks, if all have waited so long in the same exchange: one of them does not come
    out of it, or what carries their numbers is broken.
    """
    waiting = [beat for beat in beats if beat["waits"]]
    if not waiting or any(beat["paused"] is not None for beat in beats):
        return []
    ahead = max(int(beat["operations"]) for beat in waiting)
    if max(float(beat["seconds"]) for beat in waiting if beat["operations"] == ahead) < deadline:
        return []
    late = [rank for rank, beat in enumerate(beats) if beat["operations"] < ahead and beat["state"] != "done"]
    stuck = len(waiting) == len(beats) and all(float(beat["seconds"]) >= deadline for beat in beats)
    return list(range(len(beats))) if stuck and not late else late


def _is_gone(beat: Mapping[str, Any]) -> bool:
    """Whether the process of a rank on this machine has ended."""
    if beat["host"] != socket.gethostname():
        return False
    try:
        os.kill(int(beat["process"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    # A killed process stays as a zombie until its parent has asked for it.
    with suppress(OSError, IndexError):
        return Path(f"/proc/{beat['process']}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False


def describe_threads() -> str:
    """What every thread of this process is doing, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for number, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame)[-20:])
        parts.append(f"thread {names.get(number, number)}\n{stack}")
    return "\n".join(parts)[-20_000:]
