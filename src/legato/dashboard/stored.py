"""The stored rollouts of a run, searched and filtered; text of a model comes out legible and in measured portions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from legato.errors import InputError
from legato.pages.legible import legible, shorten
from legato.pages.summary import Record, number
from legato.records.directory import RunDirectory
from legato.records.lines import RunDirectoryError

MOST = 400
"""Rows that a list shows."""
PORTION = 20_000
"""Characters of a text that are shown before the rest is asked for."""
_LOOKED_BACK = 8
"""Steps that are read to find one with measured tokens: the last of a run may hold answers of an evaluation alone."""
_PREVIEW = 160
_LARGEST = 1 << 27
"""Bytes to which the rollouts of a step may unpack: a small file can hold any number of zeros."""

ORDERS = {"stored": None, "reward": "reward", "length": "tokens", "advantage": "advantage"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rollouts are asked for; what is None or empty is not asked."""

    text: str = ""
    """In prompt, response or answer, in any case."""
    verdict: str = ""
    """'right', 'wrong', 'held-out' or 'trained'."""
    stop: str = ""
    shortest: int | None = None
    longest: int | None = None
    group: int | None = None

    def takes(self, record: Record) -> bool:
        tokens = number(record, "tokens") or 0.0
        accuracy = number(record, "accuracy")
        asked = (
            not self.text or self._reads(record),
            {
                "right": accuracy is not None and accuracy >= 1,
                "wrong": accuracy is not None and accuracy < 1,
                "held-out": bool(record.get("held_out")),
                "trained": not record.get("held_out"),
            }.get(self.verdict, True),
            not self.stop or record.get("stop") == self.stop,
            self.shortest is None or tokens >= self.shortest,
            self.longest is None or tokens <= self.longest,
            self.group is None or record.get("group") == self.group,
        )
        return all(asked)

    def _reads(self, record: Record) -> bool:
        wanted = self.text.casefold()
        return any(wanted in str(record.get(key) or "").casefold() for key in ("prompt", "text", "answer"))


def list_rollouts(directory: RunDirectory, steps: Sequence[int], asked: Filter, order: str = "stored") -> dict[str, Any]:
    """Rows of the rollouts that the filter takes, newest step first, at most MOST; and what could not be read."""
    rows, damaged, matching = list[dict[str, Any]](), list[str](), 0
    key = ORDERS.get(order)
    left = sorted(steps)
    while left and (key is not None or matching < MOST):
        step = left.pop()
        try:
            records = _read_step(directory, step)
        except InputError as error:
            damaged.append(legible(str(error), one_line=True))
            continue
        taken = [_row(record, step, index) for index, record in enumerate(records) if asked.takes(record)]
        matching += len(taken)
        rows += taken
        if key is not None:
            rows.sort(key=lambda row: (row[key] is None, -(row[key] or 0.0)))
        # Cut at every step: a long run has millions.
        rows = rows[:MOST]
    return {"rows": rows, "more": matching - len(rows), "unsearched": len(left), "damaged": damaged}


def show_rollout(directory: RunDirectory, step: int, index: int, *, whole: bool) -> dict[str, Any]:
    """One rollout with what was measured at its tokens, and its siblings."""
    records = _read_step(directory, step)
    if not 0 <= index < len(records):
        raise InputError(f"step {step} has {len(records)} rollouts; number {index} is asked for")
    record = records[index]
    group = record.get("group")
    siblings = [
        _row(each, step, number) for number, each in enumerate(records) if group is not None and each.get("group") == group
    ]
    text, prompt = (str(record.get(key) or "") for key in ("text", "prompt"))
    components = _mapping(record.get("components"))
    return _row(record, step, index) | {
        "prompt": legible(prompt[: None if whole else PORTION]),
        "text": legible(text[: None if whole else PORTION]),
        "left": 0 if whole else max(0, len(text) - PORTION) + max(0, len(prompt) - PORTION),
        "components": {legible(str(k), one_line=True): number(components, k) for k in components},
        "unscorable": legible(str(record.get("unscorable") or ""), one_line=True),
        "details": _details(record),
        "siblings": siblings,
    }


def _row(record: Record, step: int, index: int) -> dict[str, Any]:
    def line(key: str) -> str:
        return legible(shorten(str(record.get(key) or ""), _PREVIEW), one_line=True)

    return {
        "step": step,
        "index": index,
        "prompt": line("prompt"),
        "text": line("text"),
        "answer": None if record.get("answer") is None else line("answer"),
        "stop": line("stop"),
        "group": number(record, "group"),
        "held_out": bool(record.get("held_out")),
        "measured": isinstance(record.get("details"), Mapping),
        **{key: number(record, key) for key in ("reward", "accuracy", "tokens", "advantage")},
    }


def _details(record: Record) -> dict[str, Any] | None:
    details = _mapping(record.get("details"))
    pieces = details.get("pieces")
    if not isinstance(pieces, list):
        return None

    def column(key: str, otherwise: float | None = None) -> list[float | None]:
        values = details.get(key)
        if not isinstance(values, list) or len(values) != len(pieces):
            return [otherwise] * len(pieces)
        return [number({"": value}, "") for value in values]

    return {
        "pieces": [legible(str(piece)) for piece in pieces],
        "logprobs": column("logprobs"),
        "log_ratios": column("log_ratios"),
        "advantages": column("advantages", number(record, "advantage")),
        "coefficients": column("coefficients"),
        "update": number(details, "update"),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read_step(directory: RunDirectory, step: int) -> list[dict[str, Any]]:
    try:
        changed = directory.rollouts_path(step).stat().st_mtime_ns
    except OSError:
        changed = 0
    return _read(directory, step, changed)


@lru_cache(maxsize=2)
def _read(directory: RunDirectory, step: int, changed: int) -> list[dict[str, Any]]:
    """Two steps stay read: people go to and fro. Held by time of change, since a resumed run writes a step again."""
    try:
        return directory.read_rollouts(step, _LARGEST)
    except RunDirectoryError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"cannot read {directory.rollouts_path(step)}: {error}") from error


def newest_measured_step(directory: RunDirectory) -> int | None:
    """The newest step with a rollout whose tokens were measured; None where the last steps have none."""
    for step in sorted(steps_of(directory), reverse=True)[:_LOOKED_BACK]:
        try:
            records = _read_step(directory, step)
        except ValueError:
            continue
        if any(_details(record) is not None for record in records):
            return step
    return None


def steps_of(directory: RunDirectory) -> Iterator[int]:
    """Steps with stored rollouts; none where the folder cannot be read."""
    try:
        yield from directory.rollout_steps()
    except OSError:
        return
