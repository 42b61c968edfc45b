"""Kills at random times and in the middle of disk operations: the resumed run must equal the straight one."""

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.trust import memory
from benchmarks.trust.trial import KINDS, REWARD, Case, digest, environment, legato_here, straight, train_words, unequal

SLEEP = "0.005"
"""Seconds that a reward takes, so that a kill falls into every phase of a step."""
LONGEST = 4.0
"""Seconds within which a kill falls; a run that is not killed takes about as long."""


def killed_at_any_time(source: random.Random) -> Iterator[Case]:
    """SIGKILL at random times, up to three times in a run: the resumed run equals the straight one to the bit."""
    server = Server()
    for kind in _kinds(source):
        times = [source.uniform(0.1, LONGEST) for _ in range(source.randint(1, 3))]
        counts: dict[str, int] = {}
        name = f"{kind}, killed after {', '.join(f'{each:.1f}' for each in times)} s"
        yield Case(name=name, check=_checker(server, kind, times, counts), counts=counts)


def killed_for_memory(source: random.Random) -> Iterator[Case]:
    """SIGKILL when the process has allocated more than its limit, as the system kills for memory: the same."""
    for kind in _kinds(source):
        counts: dict[str, int] = {}
        yield Case(
            name=f"{kind}, killed for memory", check=_out_of_memory(kind, source.randint(1, 5), counts), counts=counts
        )


def torn_saves(source: random.Random) -> Iterator[Case]:
    """SIGKILL in the middle of a random operation on the disk, a file cut in half: the same."""
    server = Server()
    for kind in _kinds(source):
        operation, counts = source.randint(1, 160), dict[str, int]()
        yield Case(
            name=f"{kind}, killed at disk operation {operation}",
            check=_torn_save_check(server, kind, operation, counts),
            counts=counts,
        )


def _kinds(source: random.Random) -> Iterator[str]:
    """All kinds of run in a random order, again and again."""
    while True:
        kinds = list(KINDS)
        source.shuffle(kinds)
        yield from kinds


class Server:
    """A process that forks a run per command (`child.py --serve`), started at the first command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run_and_kill(self, words: Sequence[str], *, seconds: float = 300.0, operation: int = 0) -> bool:
        """Run a command and kill it after `seconds`, or in an operation on the disk; whether it was still running."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.trust.child", "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment(LEGATO_TRUST_SLEEP=SLEEP),
            )
            atexit.register(self._process.kill)
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        asked.write(json.dumps({"words": list(words), "kill": operation}) + "\n")
        asked.flush()
        child = int(answers.readline())
        timer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
        timer.start()
        status = int(answers.readline())
        timer.cancel()
        return os.WIFSIGNALED(status)


def _checker(server: Server, kind: str, times: Sequence[float], counts: dict[str, int]) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        expected = straight(kind, folder)
        words = train_words(folder, KINDS[kind])
        for seconds in times:
            if server.run_and_kill(words, seconds=seconds):
                counts[kind] = counts.get(kind, 0) + 1
            if is_complete(folder):
                break
            words = next_words(folder, kind)
        return finish(folder, kind, expected)

    return check


HUNGRY = """

_calls = 0


def hungry(rollout):
    global _calls
    _calls += 1
    if os.environ.get("LEGATO_TRUST_HUNGRY") and _calls > int(os.environ["LEGATO_TRUST_HUNGRY"]):
        blocks = []
        while True:
            blocks.append(bytearray(b"x" * (1 << 24)))
    return early(rollout)
"""


def _out_of_memory(kind: str, calls: int, counts: dict[str, int]) -> Callable[[Path], str | None]:
    """After so many of about 120 calls the reward allocates without end, until the system or a watcher kills the process."""

    def check(folder: Path) -> str | None:
        place = folder / "straight-for-memory"
        place.mkdir()
        (folder / "hungry.py").write_text(REWARD + HUNGRY)
        options = {**KINDS[kind], "reward.kind": f"{folder / 'hungry.py'}:hungry"}
        ended = legato_here(*train_words(place, options))
        if ended.code:
            return f"the undisturbed run failed: {ended.describe()}"
        killer = memory.run_until_killed(
            [sys.executable, "-m", "legato.cli.main", *train_words(folder, options)],
            environment(LEGATO_TRUST_HUNGRY=str(calls)),
            seconds=120,
        )
        if killer is None:
            return "it was not killed"
        counts[f"{kind}, by {killer}"] = 1
        return finish(folder, kind, digest(place / "run"), options)

    return check


def _torn_save_check(server: Server, kind: str, operation: int, counts: dict[str, int]) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        expected = straight(kind, folder)
        if server.run_and_kill(train_words(folder, KINDS[kind]), operation=operation):
            counts[kind] = 1
        return finish(folder, kind, expected)

    return check


def next_words(folder: Path, kind: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """`resume` if there is a checkpoint to resume from, else `train` anew in place of the run that never began."""
    run = folder / "run"
    if any((run / "checkpoints").glob("step-*")):
        return ["resume", str(run)]
    if run.exists():
        run.rename(folder / f"begun-{time.monotonic_ns()}")
    return train_words(folder, KINDS[kind] if options is None else options)


def is_complete(folder: Path) -> bool:
    """Whether the run of a folder has come to its end."""
    records = folder / "run" / "metrics.jsonl"
    return records.exists() and '"all steps done"' in records.read_text()


def finish(folder: Path, kind: str, expected: dict[str, str], options: Mapping[str, Any] | None = None) -> str | None:
    """Bring a killed run to its end and compare it with the straight one."""
    run = folder / "run"
    if is_complete(folder):
        return unequal(expected, digest(run))
    ended = legato_here(*next_words(folder, kind, options))
    return f"it did not go on: {ended.describe()}" if ended.code else unequal(expected, digest(run))
