"""Finished runs of a study as one small file, so that a study can be run in slices on machines that keep nothing.

A slice holds whole seeds only. The arms of a seed are paired because they start from the same warmed-up weights, and another
machine may warm up to other bits. The file is compressed, so that no search and no diff shows a score before the study is
complete.
"""

import gzip
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from legato.compare.jobs import Job
from legato.compare.outcomes import COUNTED, NO_ROOM, outcome, status_of_failure
from legato.compare.registration import Study
from legato.compare.store import Store
from legato.errors import InputError

FORMAT = 1
SUFFIX = ".json.gz"


def describe_machine() -> dict[str, Any]:
    """When, with which code and on what the runs of this process are made. `changed`: the code differs from its commit."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else name_processor()
    commit, changed = name_code()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        **({"changed": True} if changed else {}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
    }


def export_runs(path: Path, study: Study, planned: Sequence[Job], store: Store) -> list[int]:
    """Write the runs of every seed that was run to its end in this folder; the seeds. Imported runs are left out."""
    by_seed: dict[int, list[Job]] = {}
    for job in planned:
        by_seed.setdefault(job.seed, []).append(job)
    whole: dict[int, list[dict[str, Any]]] = {}
    for seed, jobs in by_seed.items():
        if any(store.imported(job) for job in jobs):
            continue
        runs = [{"options": _options(job), **outcome(job, store)} for job in jobs]
        if all(run["status"] in COUNTED for run in runs):
            whole[seed] = runs
    content = {
        "format": FORMAT,
        "study": study.file.name,
        "sha256": study.sha256,
        "made": describe_machine(),
        "runs": [run for runs in whole.values() for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    # Without a time in its header the same runs give the same bytes.
    partial.write_bytes(gzip.compress(json.dumps(content, allow_nan=False).encode(), mtime=0))
    partial.replace(path)
    return list(whole)


def import_runs(paths: Iterable[Path], study: Study, planned: Sequence[Job], store: Store, *, retry_failed: bool) -> None:
    """Take finished runs over into the folder of the study. With `retry_failed`, seeds with a failed run are left out; seeds
    with a run without room are left out in any case, and run again.

    InputError if a slice belongs to another registration, or was run with another value of an option.
    """
    if retry_failed:
        _drop_seeds_that_failed(planned, store)
    by_name = {job.name: job for job in planned}
    sources: dict[int, Path] = {}
    for path in _files(paths):
        content = _read(path)
        if content["sha256"] != study.sha256:
            raise InputError(
                f"expected runs of {study.file} as it is (sha256 {study.sha256[:12]}), got runs of {content['study']} with"
                f" {content['sha256'][:12]} ({path}); a study that was registered anew begins anew"
            )
        failed = {
            run["seed"]
            for run in content["runs"]
            if run["status"] == "failed" and (retry_failed or status_of_failure(run["reason"]) == NO_ROOM)
        }
        for run in content["runs"]:
            if run["seed"] in failed or run["name"] not in by_name:
                continue  # a pilot takes no run of the study, and the other way round
            if sources.setdefault(run["seed"], path) != path:
                raise InputError(
                    f"expected each seed in one file, got seed {run['seed']} in {sources[run['seed']]} and {path}; a seed is"
                    " run once"
                )
            job = by_name[run["name"]]
            _check_options(path, job, run["options"])
            if store.run_path(job).exists():
                continue  # it ran, or runs, here
            kept = {key: value for key, value in run.items() if key != "options"}
            store.store_imported(job, {"made": content["made"], **kept})


def _drop_seeds_that_failed(planned: Sequence[Job], store: Store) -> None:
    """Forget the imported runs of seeds with a failed run, which an earlier start took over: they run here instead."""
    imported = [(job, run) for job in planned if (run := store.imported(job)) is not None]
    failed = {job.seed for job, run in imported if run["status"] == "failed"}
    for job, _ in imported:
        if job.seed in failed:
            store.drop_imported(job)


def slices(runs: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where the runs of a study were made, each place with its number of runs; `here` for those that do not say it."""
    places: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run["status"] in COUNTED:
            place = dict(run.get("made") or here)
            places.setdefault(repr(place), {**place, "runs": 0})["runs"] += 1
    return list(places.values())


def _options(job: Job) -> dict[str, str]:
    """The options of a run as text, but for the places it writes to."""
    places = ("output.", "policy.warm_up.cache")
    return {path: repr(value) for path, value in job.resolved.values.items() if not path.startswith(places)}


def _check_options(path: Path, job: Job, before: Mapping[str, str]) -> None:
    # An option that one side does not know came or went with the code between two slices: its default changes nothing.
    now = _options(job)
    for option in sorted({*before} & {*now}):
        if before[option] != now[option]:
            raise InputError(
                f"expected {option} = {now[option]}, got {before[option]} ({job.name} in {path}); runs with other options"
                " cannot be part of this study"
            )


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.glob(f"*{SUFFIX}"))
        elif path.is_file():
            yield path
        else:
            raise InputError(f"expected a file or folder of finished runs, got {path} (--import), which does not exist")


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        if content["format"] != FORMAT or not isinstance(content["runs"], list):
            raise ValueError(f"its format is {content['format']!r}")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"expected finished runs of a study, got {path}, which cannot be read: {error}") from None
    return content


def name_processor(description: Path = Path("/proc/cpuinfo")) -> str:
    """The processor as Linux numbers it, with the instructions that torch chose: the libraries choose the order of sums by
    both, so the same run has other bits on another kind."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in description.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    numbers = " ".join(f"{key} {fields[key]}" for key in ("cpu family", "model", "stepping") if key in fields)
    name = fields.get("model name") or platform.processor() or platform.machine()
    return ", ".join(filter(None, (name, numbers, torch.backends.cpu.get_cpu_capability())))


def name_code(package: Path = Path(__file__).parents[1]) -> tuple[str | None, bool]:
    """The commit of the code and whether files of it were changed since; LEGATO_COMMIT where the machine has a copy of the
    files without their history. (None, False) for an installed package, which may lie in a repository of someone else."""
    commit = os.environ.get("LEGATO_COMMIT")
    if commit:
        return commit, False

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.CalledProcessError):
        return None, False
