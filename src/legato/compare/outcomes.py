"""One run of a comparison as numbers: how it ended, what it scored, what it cost."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from legato.compare.jobs import Job
from legato.compare.store import Store
from legato.diagnostics.collapse import collapse
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.pages.curves import points, round_six
from legato.pages.summary import evaluations, number

MOST_POINTS = 120
"""Of a curve in compare.json; a page of many runs stays small."""

COUNTED = ("done", "collapsed", "unhealthy", "failed")
"""Endings that count. A run that is still under way, or was stopped and can go on, does not yet."""

NO_ROOM = "no room"
"""The ending of a run for which a disk or a GPU had no room. That says nothing of its algorithm, so it does not count."""

_WANT_OF_ROOM = re.compile(
    r"OutOfMemoryError|got out of memory|out of memory with one sequence|no room for|the disk is full"
)

_NOTE_OF_SAVE = re.compile(r"; the state after step \d+ is ")
"""How what became of the last step begins, behind the error that ended a run."""

CLIP = "clip/tokens"
"""The one clip fraction that means the same for token and for sequence ratios: tokens left without a gradient."""

MOVED = ("ratio/token_log_std", "ratio/token_log_max", "ratio/sequence_std", "ratio/sequence_max")
"""How far tokens and responses moved within a step."""

PHASES = ("rollouts", "anchor", "update")


def outcome(job: Job, store: Store) -> dict[str, Any]:
    """Return the outcome of a run. One that failed or that the health watch ended counts with its last accuracy, or 0."""
    imported = store.imported(job)
    if imported is not None:
        return {**imported, "status": status_of_failure(imported["reason"])} if imported["status"] == "failed" else imported
    state, failure, records = store.state(job), store.failure(job), store.records(job)
    measured = [(each.step, each.sampled, each.greedy) for each in evaluations(records) if each.sampled is not None]
    course = [(sampled.value, sampled.low, sampled.high) for _, sampled, _ in measured]
    steps = [record for record in records if record.get("kind") == "step"]
    origin = next((record for record in records if record.get("kind") == "origin"), {})
    collapsed = collapse(course) if state in ("done", "unhealthy", "failed") else None
    ending = next((str(record.get("reason")) for record in reversed(records) if record.get("kind") == "end"), None)
    whole = "collapsed" if collapsed else "done"
    statuses = {"unhealthy": "unhealthy", "done": whole, "absent": "waiting"}
    status = statuses.get(state, "stopped") if failure is None else status_of_failure(failure["reason"])
    training = job.resolved.config.training
    made = store.made(job)
    return {
        "name": job.name,
        "bed": job.bed,
        "arm": job.arm,
        "seed": job.seed,
        "point": dict(job.point),
        "status": status,
        "collapsed": collapsed,
        "reason": ending if failure is None else f"exit code {failure['code']}: {failure['reason']}",
        "score": course[-1][0] if course else 0.0 if status in ("failed", "unhealthy") else None,
        "greedy": None if not measured or measured[-1][2] is None else measured[-1][2].value,
        "start": course[0][0] if course else None,
        "best": max(course)[0] if course else None,
        "evaluations": [
            {"step": step, "sampled": round_six(sampled.value), "tokens": round(_tokens_until(steps, step))}
            for step, sampled, _ in measured
        ],
        "problems": next((each.problems for each in reversed(evaluations(records)) if each.problems is not None), None),
        "clip": _curve(steps, CLIP, every=math.ceil(training.steps / MOST_POINTS)),
        "clip_mean": _mean(steps, CLIP),
        "flip_mean": _mean(steps, "router/flip_mean"),
        "routing": _routing(steps),
        "steps": len(steps),
        # A step of which too little could be scored has no update.
        "updates": round(
            sum((number(record, "update/applied") or 0.0) for record in steps)
            * training.updates_per_step
            * training.epochs_per_step
        ),
        "tokens": round(_total(steps, "tokens/response")),
        "seconds": round_six(_total(steps, "time/step_seconds")),
        "phases": {phase: round_six(_total(steps, f"time/{phase}_seconds")) for phase in PHASES},
        "deviations": list(job.resolved.deviations),
        "moved": {key: _mean(steps, key) for key in MOVED},
        "origin": {key: origin.get(key) for key in ("weights", "problems")},
        "precision": origin.get("precision"),
        **({} if made is None else {"made": made}),
    }


def status_of_failure(reason: str) -> str:
    """The status of a run that failed for that reason. A save that found no room after another error is not the reason."""
    return NO_ROOM if _WANT_OF_ROOM.search(_NOTE_OF_SAVE.split(reason)[0]) else "failed"


def say_of_room(runs: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> None:
    """Say which runs ended for want of room and so do not count."""
    names = [run["name"] for run in runs if run["status"] == NO_ROOM]
    if names:
        say(
            f"{count(len(names), 'run')} found no room on a disk or a GPU ({', '.join(names)}). That says nothing of the"
            " algorithm, so they do not count: make room, and run the same command with --retry-failed"
        )


def outcomes(planned: Sequence[Job], store: Store) -> list[dict[str, Any]]:
    """The outcomes of all runs. InputError if runs that should have started alike did not."""
    runs = [outcome(job, store) for job in planned]
    check_origins(list(zip(planned, runs, strict=True)))
    return runs


def check_origins(runs: Sequence[tuple[Job, Mapping[str, Any]]]) -> None:
    """Runs that should start from the same weights and problems do, by the fingerprints they stored; else ValueError."""
    first: dict[tuple[object, ...], tuple[Job, Mapping[str, Any]]] = {}
    for job, run in runs:
        if run["origin"]["weights"] is None:
            continue  # it ended before it began to train
        base, first_run = first.setdefault(job.origin_key(), (job, run))
        for what in ("weights", "problems"):
            if run["origin"][what] != first_run["origin"][what]:
                raise InputError(
                    f"{job.name} did not start from the {what} of {base.name}: their fingerprints are"
                    f" {run['origin'][what]} and {first_run['origin'][what]}; what they read has changed in between,"
                    " so they cannot be compared"
                )


def _tokens_until(steps: Sequence[Mapping[str, Any]], last: int) -> float:
    return _total([record for record in steps if (number(record, "step") or 0) <= last], "tokens/response")


def _total(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(number(record, key) or 0.0 for record in steps)


def _mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = points(steps, key)[1]
    return round_six(sum(values) / len(values)) if values else None


def _routing(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Of a mixture of experts: the mean over steps of every measure of its routers, and of how far ratios went."""
    keys = sorted({key for record in steps for key in record if key.startswith("router/")})
    return {key: _mean(steps, key) for key in (*keys, *MOVED)} if keys else {}


def _curve(steps: Sequence[Mapping[str, Any]], key: str, every: int) -> list[tuple[float, float]]:
    """Return every `every`-th step of a curve: the same steps in all runs, since curves are averaged over seeds."""
    return [(step, round_six(value)) for step, value in zip(*points(steps, key), strict=True) if step % every == 0]
