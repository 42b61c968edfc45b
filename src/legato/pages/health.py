"""Findings and recoveries of the health watch as text, for the report and the dashboard."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from legato.health.rule import LEVELS
from legato.pages.legible import legible
from legato.pages.summary import Record, number

_CLASS = {"alarm": "bad", "warning": "", "note": "dim", "recovery": "good"}
_SEVERAL = {"alarm": "alarms", "warning": "warnings", "recovery": "recoveries", "note": "notes"}


def finding_row(record: Record) -> dict[str, Any] | None:
    """Return a record of health.jsonl as fields to show; None if it is malformed. A recovery counts as a note."""
    recovery = record.get("kind") == "recovery"
    level = "note" if recovery else record.get("level")
    if level not in LEVELS:
        return None
    return {
        "what": "recovery" if recovery else level,
        "level": level,
        "step": int(number(record, "from" if recovery else "step") or 0),
        "rule": legible(str(record.get("rule", "")), one_line=True),
        "words": legible(str(record.get("words", "")), one_line=True),
        "evidence": legible(str(record.get("evidence") or ""), one_line=True),
    }


def health_words(records: Sequence[Record]) -> str:
    """Count the alarms, warnings, recoveries and notes among records, in words."""
    return count_findings([row for record in records if (row := finding_row(record)) is not None])


def count_findings(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count alarms, warnings, recoveries and notes, in words."""
    what = [each["what"] for each in rows]
    counts = {word: what.count(word) for word in _SEVERAL}
    words = [f"{count} {word if count == 1 else _SEVERAL[word]}" for word, count in counts.items() if count]
    return ", ".join(words) or "nothing found"


def group_equal(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows that differ only in the step and the evidence; "steps" holds the steps of all, "step" the last one."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        same = groups.setdefault((row["what"], row["rule"], row["words"]), {**row, "steps": [], "evidence": []})
        same["steps"].append(row["step"])
        same["evidence"] += [row["evidence"]] if row["evidence"] else []
    return [
        row | {"step": max(row["steps"]), "steps": sorted(row["steps"]), "evidence": ", ".join(row["evidence"])}
        for row in groups.values()
    ]


def step_words(steps: Sequence[int]) -> str:
    """Say when something was found: at step 5; 3 times, steps 5 to 40."""
    if len(steps) == 1:
        return f"at step {steps[0]}"
    span = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"
    return f"{len(steps)} times, {span}"


def health_section(records: Sequence[Record]) -> str:
    """Return the HTML section of findings and recoveries, in order; equal ones are one line with a count."""
    rows = [row for record in records if (row := finding_row(record)) is not None]
    lines = [_line(each) for each in group_equal(rows)]
    if not lines:
        inside = "<p>No rule of the health watch held. <code>legato doctor</code> explains a run in more words.</p>"
    else:
        inside = f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"
    return f'<section><h2>Health</h2><div class="card">{inside}</div></section>'


def _line(row: Mapping[str, Any]) -> str:
    folder = f' <span class="dim">({html.escape(row["evidence"])})</span>' if row["evidence"] else ""
    what, words = row["what"], html.escape(row["words"])
    return f'<b class="{_CLASS[what]}">{what}</b> {step_words(row["steps"])}: {words}{folder}'
