"""Runs in processes of their own, several at once: the crash of one ends no other."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from legato.run.interrupt import Interrupt

_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 20.0
"""How often it is told where the runs under way are."""
_TAIL = 4096
_STEP = re.compile(rb"^(step|warm-up) +(\d+)/(\d+)", re.MULTILINE)
"""How the plain display begins the line of a step."""
_INTERRUPTED = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}
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


@dataclass(slots=True)
class _Running:
    tasks: dict[int, tuple[Task, "subprocess.Popen[bytes]"]] = field(default_factory=dict)
    """By slot."""

    def send(self, number: signal.Signals) -> None:
        for _, process in self.tasks.values():
            if process.poll() is None:
                process.send_signal(number)


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
) -> int:
    """Run the tasks in order, as many at once as the machine allows; the exit code is 0, or that of a signal we got.

    A signal stops the runs after their step, with their state saved; no further one is begun. A second one kills them.
    """
    waiting, stopping = list(tasks), False
    progress = _Progress(say)
    with (
        Interrupt(lambda text: say(text.replace("this step", "the steps under way"))) as interrupt,
        _kill_at_exit() as running,
    ):
        while running.tasks or (waiting and interrupt.received is None):
            if interrupt.received is not None and not stopping:
                stopping = True
                running.send(signal.SIGTERM)
            for slot in range(machine.parallel):
                if slot not in running.tasks and waiting and interrupt.received is None:
                    task = waiting.pop(0)
                    begun(task)
                    running.tasks[slot] = task, _start(task, machine.environment(slot))
            for slot, (task, process) in list(running.tasks.items()):
                if process.poll() is not None:
                    del running.tasks[slot]
                    ended(EndedRun(name=task.name, code=process.returncode, reason=_last_line(task.log)))
            progress.tell(task for task, _ in running.tasks.values())
            time.sleep(_POLL_SECONDS)
    return interrupt.exit_code


@contextmanager
def _kill_at_exit() -> Iterator[_Running]:
    """Kill and reap all processes when the block ends, however it ends."""
    running = _Running()
    try:
        yield running
    finally:
        running.send(signal.SIGKILL)
        for _, process in running.tasks.values():
            process.wait()


def _start(task: Task, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    with task.log.open("ab") as log:
        # A session of its own: Ctrl-C in the terminal is for us to pass on, and once, since a second signal discards a step.
        return subprocess.Popen(
            [sys.executable, "-m", "legato.cli.main", *task.words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )


_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Between fork and exec: if we are killed, the run is asked to stop and saves, in place of going on unseen."""
    assert _LIBRARY is not None
    _LIBRARY.prctl(_PARENT_DEATH, int(signal.SIGTERM))


def _progress_words(log: Path) -> str | None:
    """Return the last step a run printed, as "step 3 of 100"; None before the first."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        steps = _STEP.findall(file.read())
    return None if not steps else "{} {} of {}".format(*(word.decode() for word in steps[-1]))


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("legato: ") if lines else "it printed nothing"
