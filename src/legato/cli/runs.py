"""`legato runs`: lists the runs of a folder, and removes what they can do without. Listing loads no torch."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from legato.cli.tables import show_table
from legato.dashboard.runs import Folder, Run, parse_metrics
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.pages.legible import legible
from legato.pages.summary import number
from legato.records.directory import size_of
from legato.records.lock import is_locked
from legato.records.room import reason

_LONGEST_STATE = 36


def runs_command(folder: Path, *, prune: bool, yes: bool) -> None:
    if not folder.is_dir():
        raise InputError(f"expected a folder of runs, got {folder}, which is no folder; legato runs FOLDER lists another")
    if yes and not prune:
        raise InputError("expected --prune with --yes, got --yes alone; `legato runs FOLDER --prune --yes` removes")
    runs = Folder(folder).runs()
    console = Console(highlight=False)
    if not runs:
        console.print(Text(f"{folder} holds no runs", style="dim"))
        return
    if prune:
        _prune(console, runs, yes)
    else:
        rows = [_row(run) for run in runs]
        show_table(console, str(folder), ("run", "state", "step", "best score", "size"), rows)


def _row(run: Run) -> tuple[str, str, str, str, str]:
    row, locked = run.row(), is_locked(run.directory.path)
    # Without locks in the file system the state goes by the time of the last record.
    state = "running" if locked else row["state"]
    if state == "running" and locked is False:
        state = "no end recorded"
    best = best_score(run)
    of = f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"])
    score = "-" if best is None else f"{100 * best[0]:.1f} % at step {best[1]}"
    # A run that failed ends with its whole error; `legato doctor RUN` shows all of it.
    return row["name"], _cut(state), of, score, format_bytes(size_of(run.directory.path))


def _cut(state: str) -> str:
    return state if len(state) <= _LONGEST_STATE else f"{state[: _LONGEST_STATE - 3].rstrip(' ,')}..."


def best_score(run: Run) -> tuple[float, int] | None:
    """The highest held-out accuracy, sampled or else greedy, and its step; None without an evaluation."""
    best: tuple[float, int] | None = None
    try:
        with run.directory.metrics_path.open("rb") as file:
            # Most lines are steps, which need not be parsed.
            lines = [line for line in file if b'"evaluation"' in line[:200]]
    except OSError:
        return None
    for line in lines:
        record = parse_metrics(line) or {}
        scores = (number(record, f"eval/accuracy_{word}") for word in ("sampled", "greedy"))
        score = next((each for each in scores if each is not None), None)
        if record.get("kind") == "evaluation" and score is not None and (best is None or score > best[0]):
            best = score, int(number(record, "step") or 0)
    return best


def format_bytes(size: float) -> str:
    """A size in the largest unit that leaves a number above 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _prune(console: Console, runs: Sequence[Run], yes: bool) -> None:
    from legato.run.prune import prune, removable

    total, idle = 0, []
    for run in runs:
        if is_locked(run.directory.path) is not False:
            console.print(Text(f"{_name(run)}: is running or cannot be locked; left alone", style="dim"))
            continue
        items = removable(run.directory)
        total += sum(each.size for each in items)
        idle += [run] if items else []
        for each in items:
            place = each.path.relative_to(run.directory.path)
            words = f"{format_bytes(each.size):>9}  {_name(run)}/{place}  ({each.why})"
            console.print(Text(legible(words, one_line=True)), soft_wrap=True)
    if not idle:
        console.print("nothing to remove")
        return
    console.print(f"{format_bytes(total)} in {count(len(idle), 'run')}; records and the newest good checkpoint stay")
    if not yes and not _confirm():
        console.print("nothing was removed; --yes removes it")
        return
    freed = 0
    for run in idle:
        try:
            freed += prune(run.directory)
        except InputError as error:  # it was resumed meanwhile
            console.print(Text(legible(str(error), one_line=True)))
        except OSError as error:
            console.print(Text(legible(f"{_name(run)}: {reason(error)}", one_line=True)))
    console.print(f"removed {format_bytes(freed)}")


def _name(run: Run) -> str:
    return legible(run.name, one_line=True)


def _confirm() -> bool:
    """Ask on a terminal; elsewhere nobody can answer."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    print("remove them? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
