"""A folder of runs. Runs are listed from the first and last lines of their files and read whole only to draw curves."""

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legato.dashboard.series import Series
from legato.errors import InputError
from legato.health.rule import LEVELS
from legato.pages.health import count_findings, finding_row
from legato.pages.legible import legible, shorten
from legato.pages.several import flatten_config, read_config
from legato.pages.summary import number
from legato.records.directory import RunDirectory
from legato.records.lock import is_locked
from legato.records.tail import LONGEST, Tail, last_lines, open_plain_file, spread_lines

_DEEPEST = 4
_QUIET_SECONDS = 300
"""Where a file system has no locks, a run without an end counts as going on for so long after its last record."""
_FIRST_LOOK = 200
"""Lines of a long file read as an overview, before the whole file is read."""
_AT_ONCE = LONGEST
"""Bytes read while a page waits; more is read in a background thread. At least a line, so that reading advances."""
_SLICE = 1 << 18
"""Bytes that the background thread reads at once."""
_KINDS = ("step", "evaluation", "warm-up")
_WIDEST = 300
"""Characters of a word in the list, which is sent every second."""


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl without its histograms, which are most of the line and not needed for curves."""
    short, cut, _ = line.partition(b',"histograms":{')
    for text in (short + b"}", line) if cut else (line,):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return record if isinstance(record, dict) else None
    return None


@dataclass(slots=True)
class Run:
    """One run directory. Each line is read once; `lock` guards fields that two requests could fill at the same time."""

    name: str
    """Its path within the folder."""
    directory: RunDirectory
    metrics: Tail
    health: Tail
    series: dict[str, Series] = field(default_factory=lambda: {kind: Series() for kind in _KINDS})
    first_look: dict[str, Series] | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    summary: dict[str, Any] = field(default_factory=dict)
    summary_stamp: tuple[int, int, int] = (-1, -1, -1)
    """Sizes and time of change when `summary` was made."""
    requested: bool = False

    @classmethod
    def of(cls, folder: Path, path: Path) -> "Run":
        directory = RunDirectory(path)
        name = str(path.relative_to(folder)) if path != folder else path.resolve().name
        return cls(name=name, directory=directory, metrics=Tail(directory.metrics_path), health=Tail(directory.health.path))

    # The list of runs

    def row(self) -> dict[str, Any]:
        """Return the run's row in the list, from the first and the last lines of its files."""
        with self.lock:
            now = self._stamp()
            if now != self.summary_stamp:
                self.summary, self.summary_stamp = self._summarise(), now
            row = dict(self.summary)
        ended, locked = row.pop("ended"), is_locked(self.directory.path)
        if locked is None:  # by a file system without locks
            locked = time.time() - row["changed"] < _QUIET_SECONDS
        # A run that is resumed has the end of its last session until the first record of this one.
        row["state"] = "running" if locked else ended or "no end recorded"
        row["running"] = locked
        return row

    def _stamp(self) -> tuple[int, int, int]:
        try:
            stat = self.directory.metrics_path.stat()
        except OSError:
            return 0, self.health.size(), 0
        return stat.st_size, self.health.size(), stat.st_mtime_ns

    def _summarise(self) -> dict[str, Any]:
        size, health_size, changed = self._stamp()
        start, planned = self._start() or {}, self._read_plan()
        last, end, accuracy = self._last()
        self.read_health()
        worst = max((LEVELS.index(each["level"]) for each in self.findings), default=-1)
        return {
            "id": self.name,
            "name": _line(self.name),
            "algorithm": _line(start.get("algorithm", "")),
            "model": _line(start.get("model", "")),
            "seed": planned.get("seed"),
            "step": int(number(last, "step") or 0),
            "steps": planned.get("steps"),
            "reward": number(last, "reward/mean"),
            "accuracy": accuracy,
            "ended": None if end is None else _line(end.get("reason") or "ended"),
            "changed": changed / 1e9 or _modification_time(self.directory.path),
            "version": f"{size}-{health_size}-{changed}",
            "health": LEVELS[worst] if worst >= 0 else None,
            "findings": sum(LEVELS.index(each["level"]) == worst for each in self.findings),
            "found": count_findings(self.findings),
        }

    def _start(self) -> dict[str, Any] | None:
        try:
            with open_plain_file(self.directory.metrics_path) as file:
                lines = [file.readline(1 << 20) for _ in range(8)]
        except OSError:
            return None
        records = (parse_metrics(line) for line in lines if line.endswith(b"\n"))
        return next((record for record in records if record and record.get("kind") == "start"), None)

    def _last(self) -> tuple[dict[str, Any], dict[str, Any] | None, float | None]:
        """Return the last step record, the end record if it follows, and the last accuracy if it is near the end."""
        end, accuracy = None, None
        for most in (1 << 16, 1 << 20):
            for line in reversed(last_lines(self.directory.metrics_path, most)):
                record = parse_metrics(line) or {}
                kind = record.get("kind")
                end = record if kind == "end" and end is None else end
                if kind == "evaluation" and accuracy is None:
                    accuracy = number(record, "eval/accuracy_sampled")
                if kind == "step":
                    return record, end, accuracy
        return {}, end, accuracy

    def _read_plan(self) -> dict[str, int]:
        """Read seed and steps from the config by regex: parsing two hundred configs as TOML would take a second."""
        try:
            with open_plain_file(self.directory.config_path) as file:
                text = file.read(1 << 20).decode(errors="replace")
        except OSError:
            return {}
        training = text.partition("\n[training]\n")[2].partition("\n[")[0]
        return {name: int(value) for name, value in re.findall(r"^(seed|steps) = (\d{1,15})$", training, re.MULTILINE)}

    def options(self) -> dict[str, Any]:
        """The resolved config by dotted path; empty where it cannot be read."""
        return flatten_config(read_config(self.directory))

    def read_health(self) -> list[dict[str, Any]]:
        """Read and return all findings so far."""
        with self.lock:
            while True:
                again, lines = self.health.lines()
                self.findings = [] if again else self.findings
                if not lines:
                    return self.findings
                self.findings += [row for line in lines if (row := finding_row(parse_metrics(line) or {})) is not None]

    # Curves

    def read(self, most: int = 1 << 20) -> bool:
        """Read the next lines; False at the end of the file."""
        with self.lock:
            again, lines = self.metrics.lines(most)
            if again:
                self.series, self.damaged = {kind: Series() for kind in _KINDS}, 0
            records = [parse_metrics(line) for line in lines]
            self.damaged += records.count(None)
            _fill(self.series, records)
            return bool(lines)

    def series_to_draw(self) -> dict[str, Series]:
        """Return the series to draw. A long file gives an overview until the background thread has read it."""
        with self.lock:
            self.requested = True
            left = self.metrics.size() - self.metrics.position
            if left <= _AT_ONCE:
                while self.read():
                    pass
                self.first_look = None
                return self.series
            if self.metrics.position and self.first_look is None:
                return self.series  # read whole once; what came since is being read
            if self.first_look is None:
                self.first_look = {kind: Series() for kind in _KINDS}
                _fill(self.first_look, map(parse_metrics, spread_lines(self.directory.metrics_path, _FIRST_LOOK)))
            return self.first_look

    @property
    def behind(self) -> bool:
        return self.requested and self.metrics.size() - self.metrics.position > _AT_ONCE


class Folder:
    """All runs below a folder; a run itself is a folder of one."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise InputError(f"{path} is not a folder; `legato dashboard FOLDER` takes a folder of runs, or a run")
        self.path = path
        self.known_runs: dict[str, Run] = {}
        self._searched_at = 0.0
        self.open_requests = 0
        """Number of requests being answered."""
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def runs(self) -> list[Run]:
        """Return all runs. The folder is searched at most once a second."""
        with self._lock:
            if time.monotonic() - self._searched_at > 1:
                paths = dict.fromkeys(_directories(self.path, _DEEPEST))
                known = {run.directory.path: run for run in self.known_runs.values()}
                runs = [known.get(path) or Run.of(self.path, path) for path in paths]
                self.known_runs = {run.name: run for run in runs}
                self._searched_at = time.monotonic()
            return list(self.known_runs.values())

    def run(self, name: str) -> Run:
        """Return a run by name. Names are looked up and never turned into paths."""
        run = self.known_runs.get(name)
        if run is None:
            self.runs()
            run = self.known_runs.get(name)
        if run is None:
            raise InputError(f"no run is called {name!r} in {self.path}")
        return run

    def read_in_background(self) -> None:
        """Start the background thread that reads long files."""
        with self._lock:
            if self._reader is None or not self._reader.is_alive():
                self._reader = threading.Thread(target=self._read_all, name="reader of runs", daemon=True)
                self._reader.start()

    def _read_all(self) -> None:
        stuck = set[str]()  # files that are there and cannot be read
        while behind := [run for run in list(self.known_runs.values()) if run.behind and run.name not in stuck]:
            for run in behind:
                while run.behind and run.read(_SLICE):
                    # Requests come first: what is read here can be shown a second later.
                    time.sleep(0.02 if self.open_requests else 0)
                if run.behind:
                    stuck.add(run.name)
                else:
                    run.first_look = None


def _directories(path: Path, depth: int) -> Iterator[Path]:
    """Yield run directories at or below `path`, without searching inside a run."""
    try:
        run = _is_run(path)
        inside = [] if run or depth == 0 else sorted(filter(_is_open, path.iterdir()))
    except OSError:
        return  # a folder that only someone else may read, as `lost+found` is
    if run:
        yield path
    for each in inside:
        yield from _directories(each, depth - 1)


def _is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() or all((path / name).is_file() for name in ("config.toml", "environment.json"))


def _is_open(path: Path) -> bool:
    """Whether a folder is searched: hidden folders and links (which may form cycles) are not."""
    return not path.name.startswith(".") and path.is_dir() and not path.is_symlink()


def _fill(series: Mapping[str, Series], records: Iterable[Mapping[str, Any] | None]) -> None:
    known = [record for record in records if record is not None]
    for kind, into in series.items():
        into.add([record for record in known if record.get("kind") == kind])


def _modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _line(value: Any) -> str:
    return legible(shorten(str(value), _WIDEST), one_line=True)
