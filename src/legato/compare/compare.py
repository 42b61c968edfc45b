"""`legato compare`: train every arm with every seed, then compare the arms as far as the seeds allow."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.compare.definition import Definition
from legato.compare.jobs import Job, differences, jobs
from legato.compare.outcomes import NO_ROOM, outcome, say_of_room
from legato.compare.processes import EndedRun, Machine, Task, run_all
from legato.compare.results import collect
from legato.compare.store import Store
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.pages.comparison import write_pages
from legato.pages.report import duration
from legato.records.directory import RunDirectory
from legato.records.lines import Lines
from legato.records.lock import hold_lock
from legato.records.room import reason
from legato.run.watcher import Guard

_REPORT_SECONDS = 60.0
"""Shortest time between two reports while runs are going on: a page of many runs takes seconds to make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison or a study."""

    folder: Path
    results: dict[str, Any]
    """What compare.json or study.json holds."""
    exit_code: int


class GuardedSay:
    """Prints with another function until that one raises, which is noted in notes.jsonl of the folder."""

    def __init__(self, say: Callable[[str], None], folder: Path) -> None:
        self._say, self._guard, self._noted = say, Guard(), False
        self._notes, self._begun = Lines(folder / "notes.jsonl"), folder / "definition.json"

    def __call__(self, text: str) -> None:
        self._guard.attempt(lambda: self._say(text))
        if self._guard.note is not None and not self._noted and self._begun.exists():
            self._noted = True
            self._notes.append({"kind": "note", "text": self._guard.note})


def compare(
    definition: Definition,
    *,
    folder: Path | None = None,
    machine: Machine | None = None,
    retry_failed: bool = False,
    keep_checkpoints: bool = True,
    say: Callable[[str], None] = print,
) -> Comparison:
    """Train all unfinished runs and collect the results. A stopped comparison continues.

    All configurations are checked before the first run. Without `keep_checkpoints`, runs write none when they begin and
    end, and others are removed when a run ends.
    """
    machine = machine or Machine()
    store, planned = plan_runs(definition, folder or _folder(definition), keep_checkpoints)
    say = GuardedSay(say, store.path)
    unequal = check_equal(definition, planned, "or compare them as they are with --unequal")
    with preparing(store, definition, planned, retry_failed):

        def report() -> dict[str, Any]:
            results = collect(definition, planned, store, machine, unequal)
            store.write_results("compare.json", results)
            write_pages(store.path, results)
            return results

        code = run_jobs(planned, store, machine, say, report, keep_checkpoints=keep_checkpoints)
        results = report()
    say_of_room(results["runs"], say)
    failed = [run for run in results["runs"] if run["status"] in ("failed", NO_ROOM)]
    reasons = {run["reason"] for run in failed}
    if len(failed) == len(results["runs"]):
        raise InputError(f"every run failed: {'; '.join(sorted(reasons))}; the logs are in {store.path / 'logs'}")
    return Comparison(folder=store.path, results=results, exit_code=code)


def plan_runs(definition: Definition, folder: Path, keep_checkpoints: bool) -> tuple[Store, list[Job]]:
    """The folder and the checked runs of a definition. Nothing is written."""
    if "=" in str(folder):
        raise InputError(f"the folder {folder} holds an equals sign, which is for options; --out FOLDER names another")
    return Store(folder), jobs(definition, folder, keep_checkpoints=keep_checkpoints)


def check_equal(definition: Definition, planned: Sequence[Job], otherwise: str) -> list[str]:
    """How the arms differ in what they should share; InputError unless the definition allows that."""
    unequal = differences(planned)
    if unequal and not definition.unequal:
        raise InputError(
            "expected arms that share problems, weights and budget, got others:"
            f" {'; '.join(unequal)}; set it for all of them, {otherwise}"
        )
    return unequal


@contextmanager
def preparing(store: Store, definition: Definition, planned: Sequence[Job], retry_failed: bool) -> Iterator[None]:
    """Create or check the folder and hold its lock during the block. With `retry_failed`, failed runs start again."""
    try:
        store.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create {store.path}: {error.strerror}; --out FOLDER names another") from None
    with hold_lock(RunDirectory(store.path)):
        store.prepare(definition, planned)
        if retry_failed:
            for job in planned:
                store.failed_path(job).unlink(missing_ok=True)
        yield


def run_jobs(
    planned: Sequence[Job],
    store: Store,
    machine: Machine,
    say: Callable[[str], None],
    report: Callable[[], object],
    *,
    seconds: float = math.inf,
    blind: bool = False,
    keep_checkpoints: bool = True,
    here: Mapping[str, Any] | None = None,
) -> int:
    """Run all unfinished jobs, with a report now and then; the exit code.

    After `seconds` no further run begins; those under way go on to their end. `blind`: say that a run has ended, not how.
    Without `keep_checkpoints`, those of a run are removed when it has ended. `here`: noted for each run that begins or goes
    on, since another call, perhaps of other code on another day, may end the study.
    """
    by_name = {job.name: job for job in planned}
    tasks = _tasks(planned, store)
    finished, reported = len(planned) - len(tasks), [time.monotonic()]
    say(
        f"{count(len(planned), 'run')}, {finished} finished before; {machine.parallel} at once,"
        f" {count(machine.threads, 'thread')} each; {store.path}"
    )

    def begun(task: Task) -> None:
        if here is not None:
            store.note_made(by_name[task.name], {**here, "date": time.strftime("%Y-%m-%d")})
        say(f"{'resumes' if task.words[0] == 'resume' else 'starts '}  {task.name}")

    def ended(end: EndedRun) -> None:
        job = by_name[end.name]
        try:
            if end.code and not end.interrupted and store.state(job) != "unhealthy":
                store.note_failure(job, end.code, end.reason)
            if time.monotonic() - reported[-1] > _REPORT_SECONDS:
                reported.append(time.monotonic())
                report()
        except OSError as error:
            # The other runs go on: the report is written again at the end, and a run without a note of its failure is
            # tried again by the next command.
            say(f"cannot write {error.filename or store.path}: {reason(error)}")
        run = outcome(job, store)
        if not keep_checkpoints and run["status"] in ("done", "collapsed"):  # what failed may be tried again
            store.remove_checkpoints(job)
        lines = {
            "done": f"done     {end.name}: {_share(run['score'])} in {duration(run['seconds'])}",
            "collapsed": f"collapsed {end.name}: {run['collapsed']}",
            "unhealthy": f"unhealthy {end.name}: {run['reason']}",
            "failed": f"failed   {end.name}: {run['reason']} ({store.log_path(job)})",
            NO_ROOM: f"no room  {end.name}: {run['reason']} ({store.log_path(job)})",
        }
        if blind and run["status"] in ("done", "collapsed"):
            say(f"ended    {end.name}")
        else:
            say(lines.get(run["status"], f"stopped  {end.name} at step {run['steps']}"))

    return run_all(tasks, machine, begun=begun, ended=ended, say=say, seconds=seconds)


def _tasks(planned: Sequence[Job], store: Store) -> list[Task]:
    tasks = []
    for job in planned:
        state = store.state(job)
        if state in ("done", "unhealthy", "failed", "imported"):
            continue
        if state == "begun":
            store.clear(job)
        words = ("resume", str(store.run_path(job))) if state == "stopped" else ("train", str(store.config_path(job)))
        tasks.append(Task(name=job.name, words=words, log=store.log_path(job)))
    return tasks


def _share(score: float | None) -> str:
    return "no accuracy was measured" if score is None else f"{score:.1%}"


def _folder(definition: Definition) -> Path:
    stem = definition.recipes[0].stem if definition.recipes else "default"
    return Path("runs") / f"compare-{stem}"
