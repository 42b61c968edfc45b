"""The turns of a stored episode: what policy and environment said, and the credit of each turn."""

import html
from collections.abc import Mapping
from typing import Any

from legato.pages.legible import legible
from legato.pages.summary import number
from legato.records.directory import RunDirectory

_LONGEST = 400
"""Characters of a turn in the report."""
_STEPS_READ = 4


def turns_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a record: text, reply, reward and advantage, None where unknown; [] for a single turn."""
    dialogue = record.get("dialogue")
    if not isinstance(dialogue, list) or not dialogue:
        return []

    def at(name: str, turn: int) -> float | None:
        values = record.get(name)
        return number({"": values[turn]}, "") if isinstance(values, list) and turn < len(values) else None

    return [
        {
            "text": str(text),
            "reply": str(dialogue[2 * turn + 1]) if 2 * turn + 1 < len(dialogue) else "",
            "reward": at("turn_rewards", turn),
            "advantage": at("turn_advantages", turn),
        }
        for turn, text in enumerate(dialogue[::2])
    ]


def transcript(directory: RunDirectory) -> str:
    """A section with one episode of the newest stored step, turn by turn; "" if no episode has several turns."""
    try:
        steps = directory.rollout_steps()[-_STEPS_READ:]
    except OSError:
        return ""
    for step in reversed(steps):
        try:
            records = directory.read_rollouts(step)
        except (OSError, ValueError):
            continue
        episodes = [each for each in records if len(turns_of(each)) > 1 and turns_of(each)[0]["advantage"] is not None]
        if episodes:
            # The one whose turns differ most shows what credit by turn is.
            return _section(step, max(episodes, key=_spread))
    return ""


def _spread(record: Mapping[str, Any]) -> float:
    values = [turn["advantage"] for turn in turns_of(record) if turn["advantage"] is not None]
    return float(max(values) - min(values))


def _section(step: int, record: Mapping[str, Any]) -> str:
    rows = []
    for place, turn in enumerate(turns_of(record), 1):
        rows.append(
            f"<tr><td>{place}</td><td>{_text(turn['text'])}</td><td>{_number(turn['reward'])}</td>"
            f"<td>{_number(turn['advantage'])}</td></tr>"
        )
        if turn["reply"]:
            rows.append(f"<tr><td></td><td><em>{_text(turn['reply'])}</em></td><td></td><td></td></tr>")
    head = "<tr><th>turn</th><th>policy, then <em>environment</em></th><th>reward</th><th>advantage</th></tr>"
    return (
        f"<section><h2>An episode of step {step}, turn by turn</h2><p>Prompt: {_text(str(record.get('prompt') or ''))}</p>"
        f"<table>{head}{''.join(rows)}</table></section>"
    )


def _text(text: str) -> str:
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return html.escape(legible(shown))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
