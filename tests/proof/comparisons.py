"""Comparisons of the smallest runs, and hand-made run directories."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.compare.definition import Definition
from legato.compare.jobs import Job, jobs
from legato.compare.store import Store
from legato.diagnostics.statistics.intervals import wilson_interval
from legato.records.directory import RunDirectory
from tests.proof import verdicts
from tests.proof.runs import SMALL

PROBLEMS = 128
OPTIONS: dict[str, Any] = {
    **{path: value for path, value in SMALL.items() if path != "output.name"},
    "reward.kind": f"{verdicts.__file__}:slow",
}
"""Runs of a tenth of a second a step, or of LEGATO_TEST_SLEEP seconds a reward."""


def definition(**changes: Any) -> Definition:
    """A comparison of two algorithms with two seeds."""
    fields: dict[str, Any] = {
        "recipes": (),
        "arms": {"grpo": {"algorithm": "grpo"}, "gspo": {"algorithm": "gspo"}},
        "seeds": (0, 1),
        "options": OPTIONS,
    }
    return Definition(**{**fields, **changes})


def prepare_comparison(folder: Path, definition: Definition) -> tuple[Store, dict[str, Job]]:
    """A comparison whose runs have not started."""
    store, runs = Store(folder / "comparison"), jobs(definition, folder / "comparison")
    store.prepare(definition, runs)
    return store, {job.name: job for job in runs}


def write_run(
    store: Store,
    job: Job,
    right: Sequence[int],
    *,
    end: str | None = "all steps done",
    measured: Mapping[str, float] | None = None,
    **origin: Any,
) -> None:
    """Write the run directory of a job that solved right[k] of 128 held-out problems at step k; `measured`: more metrics."""
    directory = RunDirectory.create(store.path / "runs", job.name)
    directory.write_config("")
    directory.append_metrics({"kind": "start", "name": job.name})
    directory.append_metrics({"kind": "origin", "problems": "p", "weights": f"w{job.seed}", **origin})
    for step, each in enumerate(right):
        if step:
            directory.append_metrics({**_step(step), **(measured or {})})
        low, high = wilson_interval(each, PROBLEMS)
        accuracy = {"": each / PROBLEMS, "_low": low, "_high": high}
        evaluation = {f"eval/accuracy_sampled{key}": value for key, value in accuracy.items()}
        directory.append_metrics({"kind": "evaluation", "step": step, **evaluation, "eval/problems": PROBLEMS})
    if end is not None:
        directory.append_metrics({"kind": "end", "reason": end, "step": len(right) - 1})


def _step(step: int) -> Mapping[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "tokens/response": 100.0,
        "update/applied": 1.0,
        "clip/tokens": 0.25,
        **{f"time/{name}_seconds": value for name, value in (("rollouts", 1.0), ("anchor", 0.5), ("update", 0.5))},
        "time/step_seconds": 2.0,
    }
