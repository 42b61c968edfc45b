"""Runs in worker processes, several at once: the crash of one ends no other.

A worker trains one run after another (`cli/worker.py`). One that dies is replaced.
"""

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from legato.diagnostics.words import count
from legato.run.interrupt import ENDING, Interrupt

_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 20.0
"""How often it is told where the runs under way are."""
_TAIL = 4096
_STEP = re.compile(rb"^(step|warm-up) +(\d+)/(\d+)", re.MULTILINE)
"""How the plain display begins the line of a step."""
_INTERRUPTED = {128 + number for number in ENDING} | {-number for number in ENDING}
"""Exit codes of a run that was asked to stop, after its state was saved or before there was any."""
_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A command of `legato` with its name and the file that takes what it prints."""

    name: str
    words: tuple[str, ...]
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """How a process ended."""

    name: str
    code: int
    reason: str
    """The last line it printed."""

    @property
    def interrupted(self) -> bool:
        """Whether it was asked to stop, by us or by whoever shares the machine: it can go on later."""
        return self.code in _INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What runs may use: so many at once, each with its share of the cores, and one of the GPUs where some are named."""

    parallel: int = 1
    gpus: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Threads of each run: what OMP_NUM_THREADS says where it is set, else its share of the cores."""
        threads_set = os.environ.get("OMP_NUM_THREADS", "")
        if threads_set.isascii() and threads_set.isdigit() and int(threads_set) > 0:
            return int(threads_set)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.parallel)

    def environment(self, slot: int) -> dict[str, str]:
        """The environment of the run in a slot."""
        chosen = {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if self.gpus else {}
        return {**os.environ, "OMP_NUM_THREADS": str(self.threads), **chosen}


class _Worker:
    """A worker process and the task it works on."""

    def __init__(self, environment: dict[str, str]) -> None:
        # A session of its own: Ctrl-C in the terminal is for us to pass on, and once, since a second signal discards a step.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "legato.cli.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.task: Task | None = None

    def give(self, task: Task) -> None:
        assert self.process.stdin is not None
        self.task = task
        task.log.touch()
        with suppress(BrokenPipeError):  # it died just now: `ended` reports the task
            self.process.stdin.write(json.dumps({"words": task.words, "log": str(task.log.absolute())}).encode() + b"\n")
            self.process.stdin.flush()

    def ended(self) -> EndedRun | None:
        """How the task ended; None while it runs."""
        if self.task is None:
            return None
        assert self.process.stdout is not None
        dead = self.process.poll()  # before reading, so that the answer of a worker that just ended is not lost
        answer = self.process.stdout.read()
        if not answer and dead is None:
            return None
        task, self.task = self.task, None
        return EndedRun(name=task.name, code=int(answer) if answer else dead or 1, reason=_last_line(task.log))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            self.process.send_signal(number)

    def close(self) -> None:
        self.send(signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        self.process.wait()


@dataclass(slots=True)
class _Progress:
    """Reports the progress of runs at intervals, if it changed."""

    say: Callable[[str], None]
    last_said_at: float = field(default_factory=time.monotonic)
    said: dict[str, str] = field(default_factory=dict)

    def tell(self, tasks: Iterable[Task]) -> None:
        if time.monotonic() - self.last_said_at < _PROGRESS_SECONDS:
            return
        self.last_said_at = time.monotonic()
        for task in tasks:
            where = _progress_words(task.log)
            if where is not None and self.said.get(task.name) != where:
                self.said[task.name] = where
                self.say(f"goes on  {task.name}: {where}")


def run_all(
    tasks: Sequence[Task],
    machine: Machine,
    *,
    begun: Callable[[Task], None],
    ended: Callable[[EndedRun], None],
    say: Callable[[str], None],
    seconds: float = math.inf,
) -> int:
    """Run the tasks in order, as many at once as the machine allows; the exit code is 0, or that of a signal we got.

    After `seconds` no further task begins.

    A signal is passed on. One that ends the runs after their step, with their state saved, lets no further one begin; a
    second SIGINT or SIGTERM kills them. At SIGUSR2 the runs save and go on.
    """
    waiting, stopping, last_start = list(tasks), False, time.monotonic() + seconds
    progress = _Progress(say)
    with (
        Interrupt(lambda text: say(text.replace("this step", "the steps under way"))) as interrupt,
        _closing_workers() as workers,
    ):
        while any(worker.task for worker in workers.values()) or (waiting and interrupt.received is None):
            if interrupt.received is not None and not stopping:
                stopping = True
                for worker in workers.values():
                    worker.send(interrupt.received)
            if interrupt.take_save_request():
                for worker in workers.values():
                    worker.send(signal.SIGUSR2)
            if waiting and time.monotonic() >= last_start:
                say(f"the time is up: {count(len(waiting), 'run')} not begun")
                waiting.clear()
            for slot in range(machine.parallel):
                if waiting and interrupt.received is None and (slot not in workers or workers[slot].task is None):
                    task = waiting.pop(0)
                    begun(task)
                    if slot in workers and not workers[slot].alive:
                        workers.pop(slot).close()
                    if slot not in workers:
                        workers[slot] = _Worker(machine.environment(slot))
                    workers[slot].give(task)
            for slot, worker in list(workers.items()):
                end = worker.ended()
                if end is not None:
                    ended(end)
                    if end.code >= 128:
                        workers.pop(slot).close()  # it answers no further task
            progress.tell(worker.task for worker in workers.values() if worker.task is not None)
            time.sleep(_POLL_SECONDS)
    return interrupt.exit_code


@contextmanager
def _closing_workers() -> Iterator[dict[int, _Worker]]:
    """Workers by slot. All are killed and reaped when the block ends, however it ends."""
    workers: dict[int, _Worker] = {}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Between fork and exec: if we are killed, the run is asked to stop and saves, in place of going on unseen."""
    # SIGUSR2 would kill a worker that has not begun its run; a run replaces this by its own handler.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert _LIBRARY is not None
    _LIBRARY.prctl(_PARENT_DEATH, int(signal.SIGTERM))


def _progress_words(log: Path) -> str | None:
    """Return the last step a run printed, as "step 3 of 100"; None before the first."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            steps = _STEP.findall(file.read())
    except OSError:
        return None  # a log that somebody deleted ends no run
    return None if not steps else "{} {} of {}".format(*(word.decode() for word in steps[-1]))


def _last_line(log: Path) -> str:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("legato: ") if lines else "it printed nothing"
