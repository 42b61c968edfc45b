"""`legato rollouts`: whole samples of a run, prompt, response and score. Loads no torch."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from legato.diagnostics.words import count
from legato.errors import InputError
from legato.pages.legible import legible
from legato.pages.summary import Record, number, shown_prompt
from legato.records.directory import RunDirectory


def rollouts_command(path: Path, *, step: int | None, most: int, order: str | None) -> None:
    """Print samples of a stored step; `order` is "best", "worst" or None: as they were sampled, of different prompts."""
    directory = RunDirectory.open(path)
    steps = directory.rollout_steps()
    if not steps:
        raise InputError(
            f"{path} stores no rollouts yet: the run has not reached a step that stores them"
            " (output.rollouts_every_steps; 0 stores none)"
        )
    chosen = steps[-1] if step is None else step
    records = directory.read_rollouts(chosen)
    console = Console(highlight=False)
    shown = choose_samples(records, most, order)
    others = ", ".join(map(str, steps[:-1] if step is None else [each for each in steps if each != chosen]))
    console.print(
        Text(f"step {chosen}: {len(shown)} of {count(len(records), 'sample')}" + (f"; --step {others}" if others else "")),
        soft_wrap=True,
    )
    for record in shown:
        console.print()
        show_sample(console, record)


def choose_samples(records: Sequence[Record], most: int, order: str | None) -> list[Record]:
    """Up to `most` samples: the best or the worst by reward, else those of different prompts first."""
    if order is not None:
        scored = [record for record in records if number(record, "reward") is not None]
        return sorted(scored, key=lambda record: number(record, "reward") or 0.0, reverse=order == "best")[:most]
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(str(record.get("prompt", "")), record)
    chosen = list(first.values())
    # By identity: equal responses to a prompt are different samples.
    taken = set(map(id, chosen))
    return [*chosen, *(record for record in records if id(record) not in taken)][:most]


def show_sample(console: Console, record: Record, most_lines: float = math.inf) -> None:
    """Print a sample in full. Longer texts than `most_lines` lines of the screen are cut in the middle."""
    console.print(Text(sample_head(record), style="dim"), soft_wrap=True)
    answer = record.get("answer")
    blocks = [("prompt", shown_prompt(record)), ("response", str(record.get("text") or ""))]
    blocks += [] if answer is None else [("answer", str(answer))]
    for word, text in blocks:
        for place, line in enumerate(_lines(legible(text), console.width - 12, most_lines)):
            console.print(Text.assemble((f"  {word if place == 0 else '':<10}", "dim"), line), soft_wrap=True)


def _lines(text: str, width: int, most: float) -> list[str]:
    """The text in lines that fit, at most `most` of them."""
    lines = []
    for line in text.split("\n"):
        lines += [line[at : at + max(20, width)] for at in range(0, len(line), max(20, width))] or [""]
    if len(lines) <= most:
        return lines
    head = int(most) // 2
    tail = int(most) - head - 1
    return [*lines[:head], f"... {len(lines) - head - tail} more lines ...", *lines[len(lines) - tail :]]


def sample_head(record: Record) -> str:
    """The score of a sample in a line."""
    reward, accuracy, tokens = (number(record, key) for key in ("reward", "accuracy", "tokens"))
    words = [] if reward is None else [f"reward {reward:.3f}"]
    reason = record.get("unscorable")
    words += [f"could not be scored: {legible(str(reason), one_line=True)}"] if reason is not None else []
    if accuracy is not None and reason is None:
        words.append("right" if accuracy >= 1 else "wrong" if accuracy <= 0 else f"accuracy {accuracy:.2f}")
    words += [] if tokens is None else [count(int(tokens), "token")]
    stop = record.get("stop")
    words += [f"stopped by {legible(str(stop), one_line=True)}"] if stop else []
    return ", ".join([*words, *(["held out"] if record.get("held_out") else [])])
