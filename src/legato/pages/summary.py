"""A run in a few numbers: accuracy before, after and at best, duration, and sample rollouts."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legato.diagnostics.statistics import intervals
from legato.records.directory import RunDirectory

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A share and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Accuracy on held-out problems at one step."""

    step: int
    problems: int | None
    sampled: Interval | None
    """At the sampling temperature of the run."""
    greedy: Interval | None
    reward: float | None = None
    """The mean reward of the sampled responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers in the report's head and on the end screen."""

    name: str
    model: str
    algorithm: str
    steps: int
    seconds: float
    reason: str | None
    """Why it ended; None while it runs or if it was killed."""
    before: Evaluation | None
    after: Evaluation | None
    best: Evaluation | None
    """By sampled accuracy, then greedy."""
    sets: tuple["SetCourse", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCourse:
    """One measure (avg@16, pass@8) of an evaluation set over a run."""

    name: str
    measure: str
    problems: int | None
    points: tuple[tuple[int, Interval], ...]
    """(step, value) of each evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Rollouts of the first and the last step that stored any, on the same prompts where both have them."""

    before_step: int | None
    after_step: int | None
    before: tuple[Record, ...]
    after: tuple[Record, ...]


def summary(directory: RunDirectory) -> Summary:
    """Summarise the run so far."""
    return summarise(directory.metrics(), directory.name)


def summarise(records: Sequence[Record], name: str) -> Summary:
    """Summarise a run from the records of metrics.jsonl."""
    start = next((record for record in records if record.get("kind") == "start"), {})
    steps = [record for record in records if record.get("kind") == "step"]
    ends = [record for record in records if record.get("kind") == "end"]
    measured = evaluations(records)
    before, after = (measured[0] if measured else None), (measured[-1] if measured else None)
    if len(measured) == 1:
        before, after = (before, None) if measured[0].step == 0 else (None, after)
    return Summary(
        name=str(start.get("name") or name),
        model=str(start.get("model") or "unknown model"),
        algorithm=str(start.get("algorithm") or "unknown algorithm"),
        steps=max((int(number(record, "step") or 0) for record in steps), default=0),
        seconds=seconds_of_training(records),
        reason=str(ends[-1]["reason"]) if ends and ends[-1].get("reason") else None,
        before=before,
        after=after,
        best=max(measured, key=_rank, default=None),
        sets=tuple(set_courses(records)),
    )


def seconds_of_training(records: Sequence[Record]) -> float:
    """The seconds that a run has trained, over all its sessions: the last total recorded, plus the steps since then."""
    seconds = 0.0
    for record in records:
        if record.get("kind") == "step":
            seconds += number(record, "time/step_seconds") or 0.0
        elif record.get("kind") in ("checkpoint", "end"):
            # Runs of older versions recorded no total in checkpoints, and in the end only that of the last session.
            seconds = max(seconds, number(record, "seconds") or 0.0)
    return seconds


def evaluations(records: Sequence[Record]) -> list[Evaluation]:
    """Return all evaluations with an accuracy, in order."""
    measured = []
    for record in records:
        if record.get("kind") != "evaluation":
            continue
        problems = number(record, "eval/problems")
        sampled, greedy = (_interval(record, f"eval/accuracy_{word}", problems) for word in ("sampled", "greedy"))
        if sampled or greedy:
            step, count = int(number(record, "step") or 0), None if problems is None else int(problems)
            reward = number(record, "eval/reward_sampled")
            measured.append(Evaluation(step=step, problems=count, sampled=sampled, greedy=greedy, reward=reward))
    return measured


def set_courses(records: Sequence[Record]) -> list[SetCourse]:
    """Return the course of every measure of every evaluation set, in the order of the records."""
    points: dict[tuple[str, str], list[tuple[int, Interval]]] = {}
    problems: dict[str, int] = {}
    for record in (record for record in records if record.get("kind") == "evaluation"):
        for key in record:
            words = key.split("/")
            if len(words) != 3 or words[0] != "eval" or (value := number(record, key)) is None:
                continue
            if words[2] == "problems":
                problems[words[1]] = int(value)
            elif "@" in words[2] and not key.endswith(("_low", "_high")):
                interval = _interval(record, key, number(record, f"eval/{words[1]}/problems"))
                if interval is not None:
                    step = int(number(record, "step") or 0)
                    points.setdefault((words[1], words[2]), []).append((step, interval))
    return [
        SetCourse(name=name, measure=measure, problems=problems.get(name), points=tuple(course))
        for (name, measure), course in points.items()
    ]


def wilson_interval(share: float, trials: float) -> Interval:
    """Return a share with its Wilson interval."""
    low, high = intervals.wilson_interval(share * trials, trials)
    return Interval(value=share, low=low, high=high)


def number(record: Record, key: str) -> float | None:
    """Return a value of a record if it is a finite number, else None."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        finite = float(value)
    except OverflowError:  # a whole number beyond what a float holds
        return None
    return finite if math.isfinite(finite) else None


def samples(directory: RunDirectory, count: int = 3) -> Samples:
    """Return up to `count` rollouts of different prompts from the first and the last stored step, in stored order."""
    steps = directory.rollout_steps()
    first = _first_by_prompt(directory.read_rollouts(steps[0])) if steps else {}
    last = _first_by_prompt(directory.read_rollouts(steps[-1])) if len(steps) > 1 else {}
    shared = [prompt for prompt in first if prompt in last]
    before = [first[prompt] for prompt in (shared or first)][:count]
    after = [last[prompt] for prompt in (shared or last)][:count]
    return Samples(
        before_step=steps[0] if steps else None,
        after_step=steps[-1] if len(steps) > 1 else None,
        before=tuple(before),
        after=tuple(after),
    )


def shown_prompt(record: Record) -> str:
    """The part of a prompt worth showing: the last turn of the user, or all of a prompt that is one text."""
    question, prompt = record.get("question"), str(record.get("prompt") or "")
    if isinstance(question, str):
        return question
    # Records of older versions hold chat messages as lines "role: content" only.
    turns = re.split(r"(?:^|\n)(system|user|assistant|tool): ", prompt)
    if turns[0] or "user" not in turns[1::2]:
        return prompt
    last = max(place for place, role in enumerate(turns[1::2]) if role == "user")
    return turns[2 * last + 2]


def _first_by_prompt(records: Sequence[Record]) -> dict[str, Record]:
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(str(record.get("prompt", "")), record)
    return first


def _interval(record: Record, key: str, problems: float | None) -> Interval | None:
    value = number(record, key)
    if value is None or not 0 <= value <= 1:
        return None
    low, high = number(record, f"{key}_low"), number(record, f"{key}_high")
    if low is not None and high is not None:
        return Interval(value=value, low=low, high=high)
    return wilson_interval(value, problems or 0.0)


def _rank(evaluation: Evaluation) -> tuple[float, float]:
    sampled, greedy = evaluation.sampled, evaluation.greedy
    known = sampled or greedy
    assert known is not None  # `evaluations` keeps only those that measured something
    return known.value, greedy.value if greedy else 0.0
