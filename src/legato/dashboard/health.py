"""What the health watch found in a run, and what was done about it, for the report."""

import html
from collections.abc import Sequence

from legato.dashboard.legible import legible
from legato.dashboard.summary import Record

_CLASS = {"alarm": "bad", "warning": "", "note": "dim"}


def health_words(records: Sequence[Record]) -> str:
    """The same in a few words."""
    levels = [str(record.get("level")) for record in records if record.get("kind") == "health"]
    counts = {word: levels.count(word) for word in ("alarm", "warning")}
    counts["recovery"] = sum(record.get("kind") == "recovery" for record in records)
    several = {"alarm": "alarms", "warning": "warnings", "recovery": "recoveries"}
    told = [f"{count} {word if count == 1 else several[word]}" for word, count in counts.items() if count]
    return ", ".join(told) or "nothing found"


def health_section(records: Sequence[Record]) -> str:
    """Findings and recoveries in the order of the run; nothing where the run is from before the watch."""
    if not any(record.get("kind") == "step" for record in records):
        return ""
    found = [record for record in records if record.get("kind") in ("health", "recovery")]
    if not found:
        inside = "<p>No rule of the health watch held. <code>legato doctor</code> explains a run in more words.</p>"
    else:
        inside = f"<ul>{''.join(f'<li>{_line(record)}</li>' for record in found)}</ul>"
    return f'<section><h2>Health</h2><div class="card">{inside}</div></section>'


def _line(record: Record) -> str:
    words = _safe(record.get("words", ""))
    if record.get("kind") == "recovery":
        return f'<b class="good">recovery</b> at step {_safe(record.get("from", "?"))}: {words}'
    level = str(record.get("level", "note"))
    folder = f' <span class="dim">({_safe(record["evidence"])})</span>' if record.get("evidence") else ""
    return f'<b class="{_CLASS.get(level, "")}">{_safe(level)}</b> at step {_safe(record.get("step", "?"))}: {words}{folder}'


def _safe(value: object) -> str:
    return html.escape(legible(str(value), one_line=True))
