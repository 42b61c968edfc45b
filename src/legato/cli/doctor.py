"""Prints the findings of `legato doctor`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from legato.diagnostics.words import count
from legato.errors import InputError
from legato.health.explain import Diagnosis
from legato.pages.legible import legible
from legato.records.directory import RunDirectory
from legato.records.lock import is_locked
from legato.run.doctor import examine

_STYLE = {"alarm": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def doctor_command(target: Path, words: Sequence[str], *, columns: Sequence[str], output: Path | None) -> None:
    mapping = {}
    for column in columns:
        key, sign, name = column.partition("=")
        if not sign or not key or not name:
            raise InputError(f"expected KEY=COLUMN, got {column!r} (--column); for instance --column reward/mean=my_reward")
        mapping[key] = name
    examination = examine(target, words, mapping)
    console = Console(highlight=False)
    console.print(Text(_plain(examination.title), style="bold"))
    for fact in examination.facts:
        console.print(Text(f"  {_plain(fact)}", style="dim"))
    if not examination.found:
        checked = f"{examination.judged} of {examination.rules} rules of the health watch had their numbers"
        if examination.tested < examination.judged:
            checked += (
                f", {examination.tested} of them with enough steps ({count(examination.steps, 'step')}; rules that look at"
                " several steps or compare with the usual need more)"
            )
        head = "Nothing stands out" if examination.tested else "It is too early to tell"
        console.print(Text(f"\n{head}: {checked}, and none held. docs/health.md lists them."))
    for number, each in enumerate(examination.found, start=1):
        _show(console, number, each)
    console.print(Text.assemble(("\nnext  ", "dim"), next_command(target, words, bool(examination.found))), soft_wrap=True)
    if output is not None:
        try:
            output.write_text(json.dumps(asdict(examination), indent=1) + "\n")
        except OSError as error:
            raise InputError(f"--output {output} cannot be written: {error.strerror}") from None


def next_command(target: Path, words: Sequence[str], anything_found: bool) -> str:
    """The next useful command: resume a run that stopped, look at its samples; of another trainer's log, its settings."""
    run = target.parent if target.name == "metrics.jsonl" else target
    if not (run / "config.toml").is_file():
        if not words:
            return f"legato doctor {shlex.quote(str(target))} epsilon=0.2 num_iterations=1 (its settings tell more)"
        return "legato new NAME writes a recipe to train here; legato train NAME/recipe.toml"
    directory, path = RunDirectory(run), shlex.quote(str(run))
    look = f"legato rollouts {path} --worst" if directory.rollout_steps() else f"legato report {path}"
    if is_locked(run):
        return f"legato dashboard {path} shows the run while it goes on"
    if not any(record.get("kind") == "end" and "seconds" in record for record in directory.metrics_file.readable()):
        # Stopped by a signal, an error or the watch, or killed.
        resume = f"legato resume {path}" if directory.checkpoint_steps() else f"legato train {path}/config.toml"
        return f"{look}, then {resume} with a change from above" if anything_found else resume
    return look if anything_found else f"legato sample {path}"


def _show(console: Console, number: int, each: Diagnosis) -> None:
    head = (each.level, _STYLE[each.level])
    console.print()
    console.print(Text.assemble(f"{number}. ", head, f"  {_plain(each.says)}", (f"  [{each.name}]", "dim")))
    rows = Table.grid(padding=(0, 1))
    rows.add_column(width=11, style="dim", justify="right")
    rows.add_column()
    for word, lines in (("evidence", each.evidence), ("likely", each.causes), ("try", each.tries)):
        for place, line in enumerate(lines):
            rows.add_row(word if place == 0 else "", Text(_plain(line)))
    console.print(rows)


def _plain(text: str) -> str:
    return legible(text, one_line=True)
