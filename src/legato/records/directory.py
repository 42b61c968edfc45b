"""The run directory: all files that a run writes. Only this module knows the layout. Standard library only.

    config.toml                     the resolved recipe; `legato train` on it repeats the run
    environment.json                format version, versions of packages by allow-list, hardware, seeds
    metrics.jsonl                   one JSON object per line; "kind" says which
    rollouts/step-000120.jsonl.gz   the rollouts of that step, one per line
    checkpoints/step-000120/        model and trainer state. given-up-step-000120/: the best checkpoint, if a recovery of the
                                    health watch went back to an earlier one. damaged-step-000120/: could not be resumed
    given-up/step-000120/           records after the checkpoint that `resume --step` went back to (`health/goback.py`)
    reference/                      the model that a KL term compares with, if the configuration cannot rebuild it; with a
                                    manifest of hashes
    health.jsonl                    findings and actions of the health watch, one JSON object per line
    metrics-damaged-1.jsonl         a damaged file of records that a resumed run has repaired (`records/repair.py`)
    evidence/step-000120/           evidence for an alarm of the health watch (`health/evidence.py`). After a recovery also
                                    the discarded lines of metrics.jsonl and stored rollouts, as abandoned*
    tracker.json                    the run's id at Weights & Biases and its name at trackio, if it logs there
    report.html                     the report, one file

Kinds of lines in metrics.jsonl:

    start       before training: name, model, algorithm, deviations (list), notes (list)
    probe       step, and the noise of the ratio before any update: noise/same_* (with and without a gradient), noise/packs_*
                (in other packs), noise/engine_* (engine against trainer), words (the same as sentences)
    warm-up     step, loss
    origin      the start of training: problems, weights (fingerprints; equal fingerprints mean bitwise equality)
    note        step, text: something to know about the run from that step on
    step        step, updates, and numbers by "topic/name"; "topic/name@k" is the number of update k of the step;
                at some steps "histograms": {"ratio/sequence_log": {"edges": [n + 1], "counts": [n]}}
    evaluation  step, eval/accuracy_sampled, eval/accuracy_greedy (each with _low and _high), eval/problems; or of evaluation
                sets eval/NAME/avg@K, eval/NAME/pass@K (each with _low and _high), eval/NAME/length, eval/NAME/problems
    checkpoint  step, seconds of training so far, over all sessions
    end         reason, step, seconds (as in a checkpoint); if the health watch ended the run also healthy: the step of the
                newest healthy checkpoint, else of the oldest, or null; if evaluation.best_metric was set also best:
                checkpoint, metric, value

A rollout: {"prompt": str, "text": str, "answer": str | null, "reward": float, "accuracy": float,
"components": {name: float}, "stop": str, "tokens": int, "key": str}; of a chat also "question", its last user turn.
Training rollouts also have "group" (the number of their group) and "advantage". The first rollouts of a step have "details",
lists over their first tokens: {"pieces": [str], "logprobs", "log_ratios", "advantages", "coefficients": [float | null] or
null, "update": int | null}. "update" is the last update of the step that used the response, counted from 0. A null inside a
list marks a token that the policy did not write. A null in place of a list means: not computed (no update used the
response), or the same advantage at every token.

Kinds of lines in health.jsonl, in order of time. Lines of steps that a recovery discarded stay in the file:

    finding     step, rule, level (note, warning, alarm), family, since, metric, value, usual, words; of an alarm evidence
    recovery    step (where the run continues), from (the step of the alarm), rule, words, lr_scale, clip_scale,
                problems_skipped, evidence, best (the best checkpoint, if it is newer than the first step)

"evidence" and "best" are paths within the run directory.
"""

import gzip
import json
import os
import platform
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from legato.errors import InputError
from legato.records.lines import (
    Lines,
    RunDirectoryError,
    atomic_replace,
    explain_os_errors,
    finite,
    parse_line,
    write_records,
)
from legato.records.room import reason, until_room

FORMAT = 1
"""Version of this format. Increased when a reader of the old format would misread the new one."""

PACKAGES = (
    "legato",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "datasets",
    "bitsandbytes",
    "math-verify",
    "reasoning-gym",
    "vllm",
    "sglang",
    "numpy",
)
"""Packages whose versions are stored. An allow-list: other installed packages are private."""

_STEP = re.compile(r"step-(\d{6,})")


def check_run_folder(path: Path) -> None:
    """InputError if there is no folder at a path."""
    if not path.is_dir():
        raise InputError(f"expected a run directory, got {path}: there is no such folder")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory by its path. Use `create` for a new directory and `open` for an existing one."""

    path: Path
    writes: bool = True
    """Whether anything is written; False for the ranks of a run that leave its records to rank 0."""

    @classmethod
    def create(cls, parent: Path, name: str) -> "RunDirectory":
        """Create a new, empty run directory. An existing directory is never touched."""
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
            raise InputError(f"expected the plain name of a folder without slashes, got {name!r} (output.name)")
        path = Path(parent) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError as error:
            if not (path.exists() or path.is_symlink()):
                raise RunDirectoryError(f"cannot create {path}: a file stands in the way at {error.filename}") from error
            raise InputError(
                f"expected a new run directory, got {path}, which exists and is never overwritten: `legato resume {path}`"
                " continues it, output.name=ANOTHER_NAME starts a new run"
            ) from error
        except OSError as error:
            raise RunDirectoryError(f"cannot create {path}: {reason(error)}; output.directory=FOLDER changes it") from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open an existing run directory and check its files and its format."""
        directory = cls(Path(path))
        check_run_folder(directory.path)
        missing = [file.name for file in (directory.config_path, directory.metrics_path) if not file.is_file()]
        if missing:
            mend = f"; `legato resume {path}` mends it" if directory.checkpoint_steps() else ""
            raise InputError(f"expected a run directory, got {path}: {' and '.join(missing)} missing{mend}")
        directory._check_format(directory.environment())
        return directory

    @classmethod
    def open_to_mend(cls, path: Path) -> "RunDirectory":
        """Like `open`, but a run with a checkpoint needs no other file: a resumed run repairs the others."""
        directory = cls(Path(path))
        if not directory.checkpoint_steps():
            return cls.open(path)
        directory._check_format(directory.readable_environment() or {})
        return directory

    def _check_format(self, environment: Mapping[str, Any]) -> None:
        version = environment.get("format", FORMAT)
        if version != FORMAT:
            raise InputError(f"expected a run directory of format {FORMAT}, got format {version} ({self.path})")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def metrics_file(self) -> Lines:
        """The file metrics.jsonl."""
        return Lines(self.metrics_path, self.writes)

    @property
    def health(self) -> Lines:
        """The file health.jsonl."""
        return Lines(self.path / "health.jsonl", self.writes)

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    def rollouts_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"step-{step:06d}.jsonl.gz"

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    @property
    def journal_path(self) -> Path:
        """The folder of groups that were sampled ahead (`training/journal.py`)."""
        return self.path / "journal"

    def evidence_path(self, step: int, attempt: int = 1) -> Path:
        """Evidence folder of an alarm at a step. A run that is rolled back may reach a step several times: `attempt`."""
        return self.path / "evidence" / (f"step-{step:06d}" + (f"-{attempt}" if attempt > 1 else ""))

    # Metrics

    def append_metrics(self, record: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append one record to metrics.jsonl. With `sync` the line is on disk when this returns."""
        self.metrics_file.append(record, sync=sync)

    def metrics(self) -> list[dict[str, Any]]:
        """Read all records of metrics.jsonl."""
        return self.metrics_file.read()

    def python_parts(self) -> list[str]:
        """Names of the parts passed as Python objects (model, problems, reward), which the configuration cannot hold."""
        return [str(name) for name in self._start().get("given") or ()]

    def code(self) -> list[dict[str, str]]:
        """Files of user code the run was started with: reference, file and sha256 of each."""
        return [dict(each) for each in self._start().get("code") or ()]

    def _start(self) -> dict[str, Any]:
        # A damaged line elsewhere in the file does not matter here.
        return next((record for record in self.metrics_file.readable() if record.get("kind") == "start"), {})

    # Rollouts and checkpoints

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write the rollouts of a step. The same records give the same bytes."""
        path = self.rollouts_path(step)
        return write_records(path, records) if self.writes else path

    def read_rollouts(self, step: int, most: int | None = None) -> list[dict[str, Any]]:
        """Read the stored rollouts of a step. A file that unpacks to more than `most` bytes is refused."""
        path = self.rollouts_path(step)
        if not path.is_file():
            there = ", ".join(map(str, self.rollout_steps())) or "none"
            raise InputError(f"{path} does not exist; steps with stored rollouts: {there}")
        try:
            with explain_os_errors(path, "read"), gzip.open(path) as file:
                data = bytearray()
                while part := file.read(1 << 18):
                    data += part
                    if most is not None and len(data) > most:
                        raise RunDirectoryError(f"{path} unpacks to more than {most:,} bytes, too many to show")
        except (EOFError, zlib.error) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from error
        lines = bytes(data).splitlines()
        records = [parse_line(line) for line in lines]
        if None in records:
            raise RunDirectoryError(f"{path}, line {records.index(None) + 1}: not a JSON object; the file is damaged")
        return [record for record in records if record is not None]

    def rollout_steps(self) -> list[int]:
        """Return the steps with stored rollouts, ascending."""
        return _steps(self.path / "rollouts", ".jsonl.gz")

    def checkpoint_steps(self) -> list[int]:
        """Return the steps with a finished checkpoint folder, ascending. The folders may still be damaged."""
        return [step for step in _steps(self.path / "checkpoints", "") if self.checkpoint_path(step).is_dir()]

    # Config and environment

    def write_config(self, text: str) -> None:
        """Write the resolved recipe, given as TOML text."""
        self._write(self.config_path, text)

    def write_environment(self, extra: Mapping[str, Any]) -> None:
        """Write package versions, hardware and `extra` (seeds, devices). Environment variables are never stored."""
        hardware = {"processor": _processor(), "cores": os.cpu_count(), "memory_bytes": _memory_bytes()}
        environment: dict[str, Any] = {
            "format": FORMAT,
            "python": platform.python_version(),
            "system": platform.platform(),
            "packages": _versions(),
            **extra,
            "hardware": hardware | dict(extra.get("hardware", {})),
        }
        self._write(self.environment_path, json.dumps(finite(environment), indent=2, allow_nan=False) + "\n")

    def environment(self) -> dict[str, Any]:
        """Read environment.json. Empty if the run ended before it was written."""
        if not self.environment_path.exists():
            return {}
        with explain_os_errors(self.environment_path, "read"):
            environment = parse_line(self.environment_path.read_bytes())
        if environment is None:
            raise RunDirectoryError(f"{self.environment_path} is not a JSON object; the file is damaged")
        return environment

    def readable_environment(self) -> dict[str, Any] | None:
        """Read environment.json; None if it is missing or damaged."""
        try:
            return self.environment() or None
        except RunDirectoryError:
            return None

    def _write(self, path: Path, text: str) -> None:
        if not self.writes:
            return

        def write() -> None:
            with explain_os_errors(path, "write"), atomic_replace(path) as partial:
                partial.write_text(text, encoding="utf-8")

        until_room(write)


def _steps(folder: Path, ending: str) -> list[int]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = (_STEP.fullmatch(name.removesuffix(ending)) for name in names if name.endswith(ending))
    return sorted(int(match.group(1)) for match in matches if match)


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    """Return the processor's name, from Linux if possible: `platform` often knows only the architecture."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def unused_name(parent: Path, stem: str, number: int) -> str:
    """Return `stem-N` with the first N >= `number` that is not taken in `parent`."""
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return f"{stem}-{number}"


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder; what vanishes meanwhile counts as nothing."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(map(size_of, path.iterdir()))
        return path.lstat().st_size
    except OSError:
        return 0
