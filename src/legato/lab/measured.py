"""Studies that measure in place of training: registered, resumable by seed and analysed like the others.

A measurement is a function of the settings of the study and a seed. It returns a number for each arm and each combination of
swept values, and whatever else its page shows.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from legato.compare.compare import Comparison, GuardedSay
from legato.compare.finished import describe_machine
from legato.compare.processes import Machine
from legato.compare.registration import Study, hold_registration, registering_commit
from legato.compare.study import chosen_seeds, describe, study_folder, warn_of_power, warn_of_registration
from legato.errors import InputError, nearest
from legato.lab import gradient_noise, ratio_bias
from legato.pages.study import write_study_page
from legato.records.directory import RunDirectory
from legato.records.lock import hold_lock

Measurement = Callable[[Study, int], Iterator[dict[str, Any]]]
"""From a study and a seed to {"arm", "point", "value", ...}, one for each arm and point."""

MEASUREMENTS: Mapping[str, Measurement] = {"gradient-noise": gradient_noise.measure, "ratio-bias": ratio_bias.measure}


def measure_study(
    study: Study,
    *,
    folder: Path | None = None,
    pilot: bool = False,
    seconds: float = math.inf,
    say: Callable[[str], None] = print,
) -> Comparison:
    """Measure every seed that is not stored yet, one after another on this CPU. When the last is there, compare."""
    seeds = chosen_seeds(study, pilot)
    folder = folder or study_folder(study, pilot)
    folder.mkdir(parents=True, exist_ok=True)
    say = GuardedSay(say, folder)
    started = time.monotonic()
    registered = registering_commit(study.file.absolute(), study.sha256)
    if not pilot:
        warn_of_power(study, say)
        warn_of_registration(study, registered, say)
    with hold_lock(RunDirectory(folder)):
        runs_begun = any((folder / f"seed{seed}.json").exists() for seed in seeds)
        begun = None if pilot else hold_registration(study, folder, runs_begun=runs_begun)
        runs: list[dict[str, Any]] = []
        for seed in seeds:
            file = folder / f"seed{seed}.json"
            if not file.exists() and time.monotonic() - started < seconds:
                say(f"measures seed {seed}")
                content = {"sha256": study.sha256, "made": describe_machine(), "runs": measure_seed(study, seed)}
                file.write_text(json.dumps(content, allow_nan=False))
            runs += _load_runs(study, file) if file.exists() else _waiting(study, seed)
        results = describe(
            study,
            runs,
            Machine(),
            pilot=pilot,
            seeds=seeds,
            registered=registered,
            begun=begun,
            here=describe_machine(),
        )
        (folder / "study.json").write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        write_study_page(folder, results)
    return Comparison(folder=folder, results=results, exit_code=0)


def measure_seed(study: Study, seed: int) -> list[dict[str, Any]]:
    """The runs of one seed. One thread: the order of sums is part of the result."""
    assert study.measure is not None
    if study.measure not in MEASUREMENTS:
        known = nearest(study.measure, list(MEASUREMENTS))
        raise InputError(f"expected a measurement, got {study.measure!r} ({study.file}, measure); {known}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = list(MEASUREMENTS[study.measure](study, seed))
    finally:
        torch.set_num_threads(threads)
    runs = [{**_run(each["arm"], each["point"], seed, "done"), **each} for each in measured]
    expected = [run["name"] for run in _waiting(study, seed)]
    if sorted(run["name"] for run in runs) != sorted(expected):
        raise InputError(
            f"expected a number for each arm and swept value, got {len(runs)} of {len(expected)} ({study.file})"
        )
    return runs


def _run(arm: str, point: Mapping[str, Any], seed: int, status: str) -> dict[str, Any]:
    name = "-".join([arm, *(f"{path}{value}" for path, value in point.items()), f"seed{seed}"])
    return {"name": name, "bed": "", "arm": arm, "seed": seed, "point": dict(point), "status": status, "reason": None}


def _waiting(study: Study, seed: int) -> list[dict[str, Any]]:
    sweep = study.definition.sweep
    points = [dict(zip(sweep, values, strict=True)) for values in product(*sweep.values())]
    return [_run(arm, point, seed, "waiting") for point in points for arm in study.definition.arms]


def _load_runs(study: Study, file: Path) -> list[dict[str, Any]]:
    content = json.loads(file.read_text())
    if content["sha256"] != study.sha256:
        raise InputError(f"{file} belongs to another registration of the study; --out FOLDER begins anew")
    runs: list[dict[str, Any]] = content["runs"]
    made = {"made": content["made"]} if "made" in content else {}
    return [{**run, **made} for run in runs]
