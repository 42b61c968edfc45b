"""Kills at random times and in the middle of disk operations: the resumed run must equal the straight one."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.trust.trial import KINDS, Case, digest, environment, legato_here, straight, train_words, unequal

SLEEP = "0.01"
"""Seconds that a reward takes, so that a kill falls into every phase of a step."""


def killed_at_any_time(source: random.Random) -> Iterator[Case]:
    """SIGKILL at random times, up to three times in a run: the resumed run equals the straight one to the bit."""
    while True:
        kind, times = source.choice(list(KINDS)), [source.uniform(3.0, 9.0) for _ in range(source.randint(1, 3))]
        yield Case(name=f"{kind}, killed after {', '.join(f'{each:.1f}' for each in times)} s", check=_checker(kind, times))


def torn_saves(source: random.Random) -> Iterator[Case]:
    """SIGKILL in the middle of a random operation on the disk, a file cut in half: the same."""
    while True:
        kind, operation = source.choice(list(KINDS)), source.randint(1, 160)
        yield Case(name=f"{kind}, killed at disk operation {operation}", check=_torn(kind, operation))


def _checker(kind: str, times: Sequence[float]):  # type: ignore[no-untyped-def]
    def check(folder: Path) -> str | None:
        expected = straight(kind, folder)
        words = train_words(folder, KINDS[kind])
        for seconds in times:
            _run_and_kill(words, seconds)
            words = next_words(folder, kind)
        return finish(folder, kind, expected)

    return check


def _run_and_kill(words: Sequence[str], seconds: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "legato.cli.main", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(LEGATO_TRUST_SLEEP=SLEEP),
    )
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def _torn(kind: str, operation: int):  # type: ignore[no-untyped-def]
    def check(folder: Path) -> str | None:
        expected = straight(kind, folder)
        words = train_words(folder, KINDS[kind])
        command = [sys.executable, "-m", "benchmarks.trust.child", "--kill", str(operation), "--", *words]
        subprocess.run(command, capture_output=True, env=environment(), timeout=300, check=False)
        return finish(folder, kind, expected)

    return check


def next_words(folder: Path, kind: str) -> list[str]:
    """`resume` if there is a checkpoint to resume from, else `train` anew in place of the run that never began."""
    run = folder / "run"
    if any((run / "checkpoints").glob("step-*")):
        return ["resume", str(run)]
    if run.exists():
        run.rename(folder / f"begun-{time.monotonic_ns()}")
    return train_words(folder, KINDS[kind])


def finish(folder: Path, kind: str, expected: dict[str, str]) -> str | None:
    """Bring a killed run to its end and compare it with the straight one."""
    run, records = folder / "run", folder / "run" / "metrics.jsonl"
    if records.exists() and '"all steps done"' in records.read_text():
        return unequal(expected, digest(run))
    ended = legato_here(*next_words(folder, kind))
    return f"it did not go on: {ended.describe()}" if ended.code else unequal(expected, digest(run))
