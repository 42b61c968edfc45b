"""The folder of a comparison, and how far each of its runs has come.

definition.json     arms, seeds and sweeps; another start must have the same
configs/NAME.toml   the whole configuration of a run
runs/NAME/          an ordinary run directory
logs/NAME.log       what its process printed
failed/NAME.json    exit code and reason of one that failed
made/NAME.json      of a run of a study: when, with which code and on what it was begun, or last continued
imported/NAME.json  the outcome of a run of a study that was made on another machine
compare.json, compare.md, compare.html
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from legato.compare.definition import Definition
from legato.compare.jobs import Job
from legato.config.load import dump, load
from legato.errors import InputError
from legato.health.explain import STOPPED
from legato.records.directory import RunDirectory
from legato.records.lines import RunDirectoryError, atomic_replace
from legato.records.lock import hold_lock

FORMAT = 1
State = Literal["absent", "begun", "stopped", "done", "unhealthy", "failed", "imported"]
"""begun: there, but without a checkpoint to go on from; stopped: with one; unhealthy: the health watch ended it; imported:
it was run to its end elsewhere."""


@dataclass(frozen=True, slots=True)
class Store:
    """The folder."""

    path: Path

    def prepare(self, definition: Definition, jobs: Sequence[Job]) -> None:
        """Create the folder, or check that it belongs to this comparison. Configurations are rewritten."""
        record = describe(definition)
        file = self.path / "definition.json"
        if file.exists():
            self._check_same(record, jobs)
        elif self.path.exists() and any(each.name != ".lock" for each in self.path.iterdir()):
            raise InputError(f"{self.path} is there already and holds no comparison; --out FOLDER names another")
        for name in ("configs", "runs", "logs", "failed"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        for job in jobs:
            self.config_path(job).write_text(dump(job.resolved), encoding="utf-8")
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _check_same(self, record: Mapping[str, Any], jobs: Sequence[Job]) -> None:
        try:
            before = json.loads((self.path / "definition.json").read_text(encoding="utf-8"))
            changed = [key for key in record if before.get(key) != record[key]]
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.path / 'definition.json'} cannot be read: {error}; --out FOLDER names another"
            ) from None
        changes = [f"{key} = {record[key]!r} (was {before.get(key)!r})" for key in changed]
        for job in jobs if not changes else ():
            if self.config_path(job).is_file():
                old, new = load([self.config_path(job)]).values, job.resolved.values
                changes += [
                    f"{path} = {new.get(path)!r} (was {old.get(path)!r}) in {job.name}"
                    for path in sorted({*old, *new})
                    if old.get(path) != new.get(path) and not path.startswith(("output.", "policy.warm_up.cache"))
                ]
        if changes:
            more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
            raise InputError(
                f"{self.path} holds another comparison: {changes[0]}{more}; what is there goes on only as it was begun,"
                " --out FOLDER begins another"
            )

    def write_results(self, name: str, results: Mapping[str, Any]) -> None:
        """Write the results as JSON; a number that is not finite is a fault."""
        text = json.dumps(results, indent=1, allow_nan=False) + "\n"
        (self.path / name).write_text(text, encoding="utf-8")

    def config_path(self, job: Job) -> Path:
        return self.path / "configs" / f"{job.name}.toml"

    def run_path(self, job: Job) -> Path:
        return self.path / "runs" / job.name

    def log_path(self, job: Job) -> Path:
        return self.path / "logs" / f"{job.name}.log"

    def failed_path(self, job: Job) -> Path:
        return self.path / "failed" / f"{job.name}.json"

    def imported_path(self, job: Job) -> Path:
        return self.path / "imported" / f"{job.name}.json"

    def state(self, job: Job) -> State:
        """How far a run has come."""
        if self.imported_path(job).exists():
            return "imported"
        if self.failed_path(job).exists():
            return "failed"
        if not self.run_path(job).exists():
            return "absent"
        directory = RunDirectory(self.run_path(job))
        try:
            records = RunDirectory.open(directory.path).metrics()
        except (ValueError, RunDirectoryError):
            # Damaged records, say: a resumed run repairs them. Only a run without a checkpoint has to start again.
            records = []
        if records and records[-1].get("kind") == "end":
            reason = str(records[-1].get("reason"))
            if reason.startswith(STOPPED):
                return "unhealthy"
            if not reason.startswith("stopped by"):
                return "done"
        return "stopped" if directory.checkpoint_steps() else "begun"

    def records(self, job: Job) -> list[dict[str, Any]]:
        """What a run has recorded so far."""
        path = self.run_path(job)
        return RunDirectory(path).metrics() if path.is_dir() else []

    def failure(self, job: Job) -> dict[str, Any] | None:
        """Exit code and reason of a run that failed."""
        path = self.failed_path(job)
        record: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return record

    def note_failure(self, job: Job, code: int, reason: str) -> None:
        self.failed_path(job).write_text(json.dumps({"code": code, "reason": reason}) + "\n", encoding="utf-8")

    def note_made(self, job: Job, made: Mapping[str, Any]) -> None:
        path = self.path / "made" / f"{job.name}.json"
        with atomic_replace(path) as partial:
            partial.write_text(json.dumps(made) + "\n", encoding="utf-8")

    def made(self, job: Job) -> dict[str, Any] | None:
        """When, with which code and on what a run of a study was made; None where that was not noted."""
        path = self.path / "made" / f"{job.name}.json"
        made: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return made

    def imported(self, job: Job) -> dict[str, Any] | None:
        """The outcome of a run that was made on another machine; None for others."""
        path = self.imported_path(job)
        run: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return run

    def store_imported(self, job: Job, run: Mapping[str, Any]) -> None:
        self.imported_path(job).parent.mkdir(exist_ok=True)
        self.imported_path(job).write_text(json.dumps(run, allow_nan=False) + "\n", encoding="utf-8")

    def drop_imported(self, job: Job) -> None:
        self.imported_path(job).unlink(missing_ok=True)

    def remove_checkpoints(self, job: Job) -> None:
        """Remove the checkpoints of a run that has ended; its records stay."""
        shutil.rmtree(self.run_path(job) / "checkpoints", ignore_errors=True)

    def clear(self, job: Job) -> None:
        """Remove a run that has no checkpoint: it can only start again."""
        path = self.run_path(job)
        with hold_lock(RunDirectory(path)):
            shutil.rmtree(path)


def describe(definition: Definition) -> dict[str, Any]:
    """What another start of a comparison must have the same of, beside every configuration."""
    return {
        "format": FORMAT,
        "arms": list(definition.arms),
        "seeds": list(definition.seeds),
        "sweep": {path: list(values) for path, values in definition.sweep.items()},
    }
