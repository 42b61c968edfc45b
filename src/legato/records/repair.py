"""Repairs the JSON-lines files of a run: readable lines are kept, the damaged file is set aside, and the loss is named.

Records are no part of the training state. A damaged or deleted file must not keep a run from its sound checkpoints.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.records.directory import RunDirectory
from legato.records.lines import Lines, atomic_replace, encode_line, explain_os_errors, parse_line


def fit_metrics(directory: RunDirectory, position: int, step: int, start: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The byte of metrics.jsonl where the records of a checkpoint end, and sentences on what was lost.

    `position` is where they ended when the checkpoint of `step` was saved. If the file has changed since, they end with the
    record of that checkpoint. A damaged file is repaired: it then holds the readable records up to the checkpoint, with
    `start` in front if that record is lost.
    """
    file = directory.metrics_file
    lines = file.after(0).splitlines(keepends=True)
    records = [parse_line(line) for line in lines]
    ends = [0, *itertools.accumulate(map(len, lines))]
    # Look at the record too: in a file that was repaired, the position may be the end of another line.
    saves = [end for end, record in zip(ends[1:], records, strict=True) if record is not None and _is_save(record, step)]
    if position in saves and None not in records[: ends.index(position)]:
        return position, []
    if saves and None not in records and _has_start(file.readable()):
        lost = _lost_steps(file.readable(), step)
        return saves[-1], [f"metrics.jsonl has changed since the checkpoint; {_describe(lost)}"] if lost else []
    return _repair(file, _until_checkpoint(file.readable(), step), step, start)


def fit_health(directory: RunDirectory, position: int, step: int) -> tuple[int, list[str]]:
    """Like `fit_metrics`, for health.jsonl."""
    file = directory.health
    lines = file.after(0).splitlines(keepends=True)
    ends = [0, *itertools.accumulate(map(len, lines))]
    if position in ends and all(parse_line(line) is not None for line in lines[: ends.index(position)]):
        return position, []
    return _repair(file, [record for record in file.readable() if _step_of(record) <= step], step, None)


def mend(directory: RunDirectory, step: int, start: Mapping[str, Any]) -> list[str]:
    """Repair records that were damaged or deleted while the run wrote them; sentences on what was lost."""
    sentences = []
    for file, first in ((directory.metrics_file, start), (directory.health, None)):
        readable = file.readable()
        if len(readable) < len(file.after(0).splitlines()) or (first is not None and not _has_start(readable)):
            sentences += _repair(file, readable, step, first)[1]
    return sentences


def _has_start(records: Sequence[Mapping[str, Any]]) -> bool:
    return any(record.get("kind") == "start" for record in records)


def _is_save(record: Mapping[str, Any], step: int) -> bool:
    return record.get("kind") == "checkpoint" and record.get("step") == step


def _until_checkpoint(records: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The records that a run had written when it saved the checkpoint of `step`."""
    saves = [number for number, record in enumerate(records) if _is_save(record, step)]
    if saves:
        records = records[: saves[-1] + 1]
    # The probe before step n + 1 is stored with step n, after the checkpoint of step n.
    return [
        record
        for record in records
        if record.get("kind") != "end" and _step_of(record) + (record.get("kind") == "probe" and not saves) <= step
    ]


def _step_of(record: Mapping[str, Any]) -> int:
    """The step of a record; 0 for records without one and for warm-ups, which count steps of their own."""
    step = record.get("step")
    return step if isinstance(step, int) and record.get("kind") != "warm-up" else 0


def _repair(
    file: Lines, records: Sequence[Mapping[str, Any]], step: int, start: Mapping[str, Any] | None
) -> tuple[int, list[str]]:
    """Set the file aside and write `records` in its place; the new size and sentences on what was lost."""
    aside = _set_aside(file.path)
    kept = f"the damaged file is kept as {aside.name}" if aside is not None else "it had been deleted or emptied"
    words = f"{file.path.name} was damaged: records that can be read stay ({len(records)}); {kept}"
    if start is not None:
        words += f"; {_describe(_lost_steps(records, step))}"
        records = [*([] if _has_start(records) else [start]), *records, {"kind": "note", "step": step, "text": words}]
    with explain_os_errors(file.path, "write"), atomic_replace(file.path) as partial:
        with partial.open("wb") as new:
            new.writelines(encode_line(record) for record in records)
            new.flush()
            os.fsync(new.fileno())
        size = partial.stat().st_size
    return size, [words]


def _lost_steps(records: Sequence[Mapping[str, Any]], step: int) -> list[int]:
    """The steps up to `step` without a record."""
    there = {_step_of(record) for record in records if record.get("kind") == "step"}
    return [each for each in range(1, step + 1) if each not in there]


def _describe(lost: Sequence[int]) -> str:
    if not lost:
        return "the records of all steps are there"
    if len(lost) == 1:
        return f"the records of step {lost[0]} are lost"
    together = lost[-1] - lost[0] + 1 == len(lost)
    return f"the records of {f'steps {lost[0]} to {lost[-1]}' if together else f'{len(lost)} steps'} are lost"


def _set_aside(path: Path) -> Path | None:
    """Rename a file to NAME-damaged-N; None if there is nothing in it to keep."""
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return None
    number = 1
    while (aside := path.with_name(f"{path.stem}-damaged-{number}{path.suffix}")).exists():
        number += 1
    with explain_os_errors(path, "rename"):
        path.rename(aside)
    return aside
