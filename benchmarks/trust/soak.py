"""A soak: a run of many steps in one process, whose memory, open files and threads must not grow."""

import contextlib
import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.trust.memory import resident_bytes
from benchmarks.trust.trial import REWARD, SMALL, Case

ALLOWED_BYTES = 32 * 2**20
"""Growth that the allocator and growing records may cause over a soak."""
WARM_SECONDS = 300.0
"""How long caches may fill before growth counts; of a short soak it is the first third."""
READINGS = 12
"""How many readings are stored, evenly spread."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the process holds after a step."""

    step: int
    seconds: float
    resident_bytes: int
    open_files: int
    threads: int


def soak(source: random.Random, minutes: float = 1.0) -> Iterator[Case]:
    """Steps, evaluations and saves in one process for `--soak-minutes`: memory, open files and threads do not grow."""
    while True:
        measured: dict[str, Any] = {}
        yield Case(name=f"{minutes:g} minutes of steps", check=lasting(60 * minutes, measured), measured=measured)


def lasting(seconds: float, measured: dict[str, Any]) -> Callable[[Path], str | None]:
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
        readings: list[Reading] = []
        started = time.monotonic()
        warm = min(seconds / 3, WARM_SECONDS)

        def watch(report: Any) -> None:
            passed = time.monotonic() - started
            if passed > warm and report.step % 10 == 0:
                gc.collect()
                readings.append(_read(report.step, passed))
            if passed > seconds:
                raise _OverError

        with contextlib.suppress(_OverError):
            train(callback=watch, progress=False, **options)
        stored = readings[:: max(1, len(readings) // READINGS)]
        measured.update(minutes=seconds / 60, readings=[asdict(each) for each in [*stored, *readings[-1:]]])
        return growth(readings)

    return check


def growth(readings: Sequence[Reading]) -> str | None:
    """What grew between the first and the last reading; None if nothing did."""
    if len(readings) < 4:
        return f"only {len(readings)} readings: too slow a machine for this soak"
    first, last = readings[0], readings[-1]
    grown = last.resident_bytes - first.resident_bytes
    if grown > ALLOWED_BYTES:
        return f"memory grew by {grown / 2**20:.0f} MiB in {last.step - first.step} steps"
    for name in ("open_files", "threads"):
        before, after = getattr(first, name), getattr(last, name)
        if after > before + 2:
            return f"{name.replace('_', ' ')} grew from {before} to {after}"
    return None


def _read(step: int, seconds: float) -> Reading:
    files, threads = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
    return Reading(step, round(seconds, 1), resident_bytes(os.getpid()), files, threads)


class _OverError(Exception):
    """Ends the run of a soak."""
