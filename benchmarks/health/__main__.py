"""Measure whether the health watch detects injected faults and stays quiet on healthy runs, on the tiny task.

    python -m benchmarks.health --seeds 10-19                     # the collapse, its recovery, healthy runs
    python -m benchmarks.health --seeds 10-14 --arms faults       # the other faults
    python -m benchmarks.health --seeds 10-14 --arms early        # a learning rate too high from the first step on
    python -m benchmarks.health --seeds 100-102 --arms verify     # check that the collapse does not recover by itself

Each seed has one healthy run of 50 steps. Every arm continues from a copy of it, bit for bit, with a fault from step 51 on.
Finished arms are stored in the work folder, so that an interrupted command resumes. Results go to
benchmarks/results/health.json; `page.py` renders docs/experiments/health.md from it.
"""

import argparse
import hashlib
import json
import platform
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.health.faults import FAULTS, inject
from legato.config.load import load
from legato.health.rules import MARGIN, RULES
from legato.records.directory import RunDirectory
from legato.run import train
from legato.run.watcher import Silent

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tiny.toml"
RESULTS = Path(__file__).parents[1] / "results" / "health.json"
FIRST = 50
"""The last healthy step."""
COLLAPSE = "learning rate x 5"
ARMS: dict[str, tuple[str | None, int, dict[str, Any]]] = {
    "healthy": (None, 250, {}),
    "collapse": (COLLAPSE, 120, {}),
    "recover": (COLLAPSE, 150, {"health.action": "recover"}),
    "verify": (COLLAPSE, 200, {}),
    "rollback": (COLLAPSE, 150, {"health.action": "recover", "health.lr_factor": 1.0}),
    **{f"fault: {name}": (name, 110, {}) for name in FAULTS if name != COLLAPSE},
}
"""Fault, last step, options."""
EARLY = {f"early: learning rate x {factor}": factor for factor in (5, 10, 20)}
"""Arms with a multiple of the recipe's learning rate from the first step on, without a healthy start."""
EARLY_STEPS = 60
WORDS = ("says", "causes", "tries", "beside")
"""Fields of a rule that are text for people; no threshold depends on them."""
MAIN = ("collapse", "recover", "healthy")
OPTIONS = {
    "task.held_out": 16,
    "evaluation.every_steps": 1_000_000,
    "evaluation.target": False,
    "evaluation.target_greedy": False,
    "training.probe_every_steps": 0,
    "output.rollouts_every_steps": 0,
    "output.checkpoint_every_steps": 5,
    "output.keep_last": 12,
    "health.evidence_steps": 1,
}


def thresholds() -> str:
    """A hash of the thresholds of all rules, because results of different thresholds must not be mixed."""
    tested = [{key: value for key, value in asdict(rule).items() if key not in WORDS} for rule in RULES]
    return hashlib.sha256(json.dumps([MARGIN, tested], sort_keys=True).encode()).hexdigest()[:16]


def recipe_lr() -> float:
    return load([RECIPE]).config.training.lr


def healthy_start(work: Path, seed: int, options: dict[str, Any]) -> Path:
    """The run directory of a seed's healthy first steps. It is trained if it does not exist yet."""
    place = work / "base"
    if not (place / f"seed{seed}" / "report.html").exists():
        shutil.rmtree(place / f"seed{seed}", ignore_errors=True)
        train_from_start(place / f"seed{seed}", seed, {**options, "training.steps": FIRST})
    return place / f"seed{seed}"


def train_from_start(run: Path, seed: int, options: dict[str, Any]) -> train.Run:
    """Train a run from its first step."""
    settings = {**OPTIONS, **options, "training.seed": seed, "output.directory": str(run.parent), "output.name": run.name}
    return raise_if_stopped(train.train(recipe=RECIPE, progress=False, **settings))


def resume_with_fault(run: Path, start: Path, arm: str, steps: int | None) -> train.Run:
    """Copy the healthy run directory `start` and resume it with the fault of an arm."""
    fault, last, options = ARMS[arm]
    shutil.copytree(start, run)
    words = [f"{path}={value}" for path, value in {"training.steps": steps or last, **options}.items()]
    with inject(None if fault is None else FAULTS[fault].make(start), FIRST):
        return raise_if_stopped(train.resume(run, words, watcher=Silent(), allow_changes=True))


def raise_if_stopped(ended: train.Run) -> train.Run:
    if ended.exit_code >= 128:
        raise KeyboardInterrupt
    return ended


def measure(work: Path, arm: str, seed: int, options: dict[str, Any], steps: int | None = None) -> dict[str, Any]:
    """Run one arm of a seed and return its rewards, findings and recoveries."""
    run, start = work / "run", None if arm in EARLY else healthy_start(work, seed, options)
    shutil.rmtree(run, ignore_errors=True)
    began = time.process_time()
    if start is None:
        rate = {"training.lr": EARLY[arm] * recipe_lr(), "training.steps": steps or EARLY_STEPS}
        ended = train_from_start(run, seed, {**options, **rate})
    else:
        ended = resume_with_fault(run, start, arm, steps)
    directory = RunDirectory.open(run)
    records = directory.health.read()
    fields = ("step", "rule", "level", "since", "value", "usual")
    steps_done = [record for record in directory.metrics() if record["kind"] == "step"]
    return {
        "arm": arm,
        "seed": seed,
        "thresholds": thresholds(),
        "rewards": [_round(record["reward/mean"]) for record in steps_done],
        "findings": [{k: r[k] for k in fields} for r in records if r["kind"] == "finding"],
        "recoveries": [{k: v for k, v in r.items() if k != "kind"} for r in records if r["kind"] == "recovery"],
        "exit_code": ended.exit_code,
        "reason": ended.reason,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def run_arms(work: Path, arms: Sequence[str], seeds: Sequence[int], options: dict[str, Any], steps: int | None) -> None:
    """Run every arm of every seed that has no stored result. Arms measured with other thresholds run again."""
    (work / "done").mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for arm in arms:
            path = work / "done" / f"{arm.replace(' ', '-').replace(':', '')}-{seed}.json"
            if path.is_file() and json.loads(path.read_text())["thresholds"] == thresholds():
                continue
            # Writing a report takes longer than a small run, and nobody reads these reports.
            with mock.patch.object(train, "write_report", lambda directory: directory.report_path.touch()):
                done = measure(work, arm, seed, options, steps)
            path.write_text(json.dumps(done))
            print(f"{arm}, seed {seed}: {_describe(done)}", flush=True)


def _describe(done: dict[str, Any]) -> str:
    alarms = [f"{each['rule']} at {each['step']}" for each in done["findings"] if each["level"] == "alarm"]
    rewards = [each for each in done["rewards"] if each is not None]
    return (
        f"reward {rewards[0]:.2f}, at the end {statistics.fmean(rewards[-20:]):.2f}; {', '.join(alarms[:4]) or 'no alarm'};"
        f" {len(done['recoveries'])} recoveries; {done['cpu_seconds']} s"
    )


def gather(work: Path) -> dict[str, Any]:
    """All stored results with the current thresholds, as the content of the results file."""
    runs = [json.loads(path.read_text()) for path in sorted((work / "done").glob("*.json"))]
    current = [run for run in runs if run["thresholds"] == thresholds()]
    return {
        "thresholds": thresholds(),
        "first": FIRST,
        "lr": recipe_lr(),
        "machine": f"{platform.machine()}, one thread, Python {platform.python_version()}",
        "runs": current,
    }


def parse_seeds(text: str) -> list[int]:
    """The seeds of `"10-19"` or `"3"`."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0-9")
    parser.add_argument("--arms", default="main", help="main, faults, early, or names of arms separated by commas")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "health")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    groups = {"main": list(MAIN), "faults": [arm for arm in ARMS if arm.startswith("fault: ")], "early": list(EARLY)}
    arms = groups.get(options.arms, options.arms.split(","))
    run_arms(options.work, arms, parse_seeds(options.seeds), {}, None)
    options.output.write_text(json.dumps(gather(options.work), indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
