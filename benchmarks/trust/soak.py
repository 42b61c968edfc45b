"""A soak: a run of many steps in one process, whose memory, open files and threads must not grow."""

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.trust.trial import REWARD, SMALL, Case

ALLOWED_BYTES = 32 * 2**20
"""Growth that the allocator and growing records may cause over a soak."""


def soak(source: random.Random) -> Iterator[Case]:
    """A minute of steps in one process, again and again: memory, open files and threads do not grow."""
    while True:
        yield Case(name="a minute of steps", check=lasting(60.0))


def lasting(seconds: float) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        from legato.run.train import train

        (folder / "early.py").write_text(REWARD)
        options = {
            **SMALL,
            "reward.kind": f"{folder / 'early.py'}:early",
            "output.directory": str(folder),
            "training.steps": 10**6,
            "evaluation.every_steps": 25,
            "output.checkpoint_every_steps": 25,
        }
        readings: list[tuple[int, int, int]] = []
        deadline, started = time.monotonic() + seconds, time.monotonic()

        def watch(report: Any) -> None:
            now = time.monotonic()
            # The first third warms caches up; after it nothing may grow.
            if not readings and now < started + seconds / 3:
                return
            if report.step % 10 == 0:
                gc.collect()
                readings.append((_resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()))
            if now > deadline:
                raise _OverError

        with contextlib.suppress(_OverError):
            train(callback=watch, **options)
        if len(readings) < 4:
            return f"only {len(readings)} readings: too slow a machine for this soak"
        first, last = readings[0], readings[-1]
        if last[0] - first[0] > ALLOWED_BYTES:
            return f"memory grew by {(last[0] - first[0]) / 2**20:.0f} MiB in {len(readings) * 10} steps"
        for place, name in ((1, "open files"), (2, "threads")):
            if last[place] > first[place] + 2:
                return f"{name} grew from {first[place]} to {last[place]}"
        return None

    return check


class _OverError(Exception):
    """Ends the run of a soak."""


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
