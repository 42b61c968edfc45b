"""The stored rollouts of a run, searched and filtered. Text of a model is made legible and cut into portions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from legato.errors import InputError
from legato.pages.legible import legible, shorten
from legato.pages.summary import Record, number
from legato.pages.turns import turns_of
from legato.records.directory import RunDirectory
from legato.records.lines import RunDirectoryError

MOST = 400
"""Most rows of a list."""
PORTION = 20_000
"""Characters of a text that are shown before the reader asks for the rest."""
_STEPS_SEARCHED = 8
"""Steps searched for measured tokens: the last step of a run may hold only the answers of an evaluation."""
_PREVIEW = 160
_LARGEST = 1 << 27
"""Most bytes of the rollouts of a step when decompressed: a small file can hold any number of zeros."""

ORDERS = {"stored": None, "reward": "reward", "length": "tokens", "advantage": "advantage"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Conditions on rollouts; a field that is None or empty is no condition."""

    text: str = ""
    """Searched in prompt, response and answer, ignoring case."""
    verdict: str = ""
    """'right', 'wrong', 'held-out' or 'trained'."""
    stop: str = ""
    shortest: int | None = None
    longest: int | None = None
    group: int | None = None

    def accepts(self, record: Record) -> bool:
        tokens = number(record, "tokens") or 0.0
        accuracy = number(record, "accuracy")
        conditions = (
            not self.text or self._contains_text(record),
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
        return all(conditions)

    def _contains_text(self, record: Record) -> bool:
        text = self.text.casefold()
        return any(text in str(record.get(key) or "").casefold() for key in ("prompt", "text", "answer"))


def list_rollouts(
    directory: RunDirectory, steps: Sequence[int], rollout_filter: Filter, order: str = "stored"
) -> dict[str, Any]:
    """Return rows of the rollouts that the filter accepts, newest step first, at most MOST, and the damaged files."""
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
        matches = [_row(record, step, index) for index, record in enumerate(records) if rollout_filter.accepts(record)]
        matching += len(matches)
        rows += matches
        if key is not None:
            rows.sort(key=lambda row: (row[key] is None, -(row[key] or 0.0)))
        # Cut at every step: a long run has millions.
        rows = rows[:MOST]
    return {"rows": rows, "more": matching - len(rows), "unsearched": len(left), "damaged": damaged}


def show_rollout(directory: RunDirectory, step: int, index: int, *, whole: bool) -> dict[str, Any]:
    """Return one rollout with the numbers of its tokens and the other responses of its group."""
    records = _read_step(directory, step)
    if not 0 <= index < len(records):
        raise InputError(f"expected a rollout number below {len(records)}, got {index} (step {step})")
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
        "turns": [
            {**each, "text": legible(each["text"][:PORTION]), "reply": legible(each["reply"][:PORTION])}
            for each in turns_of(record)
        ],
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
    """Cached for two steps, since people switch between two; `changed` is part of the key: a resumed run rewrites a step."""
    try:
        return directory.read_rollouts(step, _LARGEST)
    except RunDirectoryError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"cannot read {directory.rollouts_path(step)}: {error}") from error


def newest_measured_step(directory: RunDirectory) -> int | None:
    """Return the newest step with a rollout whose tokens were measured; None if the last steps have none."""
    for step in sorted(steps_of(directory), reverse=True)[:_STEPS_SEARCHED]:
        try:
            records = _read_step(directory, step)
        except ValueError:
            continue
        if any(_details(record) is not None for record in records):
            return step
    return None


def steps_of(directory: RunDirectory) -> Iterator[int]:
    """Yield the steps with stored rollouts; none if the folder cannot be read."""
    try:
        yield from directory.rollout_steps()
    except OSError:
        return
