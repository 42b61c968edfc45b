"""The end screen of a run: accuracy before and after, samples, paths, and the next command."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from legato.cli.rollouts import show_sample
from legato.diagnostics.words import count
from legato.pages.legible import legible, shorten
from legato.pages.report import duration, verdict
from legato.pages.summary import Evaluation, Interval, Record, Samples, Summary, number, shown_prompt

SHOWN_SAMPLES = 3
_WHOLE_SAMPLES = 2
_LINES_OF_A_TEXT = 12
"""Of a whole sample at the end of a run; `legato rollouts` shows all of it."""
_STYLE = {"rose": "bold green", "fell": "bold red"}


def end_screen(
    summary: Summary,
    *,
    samples: Samples | None = None,
    checkpoint: Path | None = None,
    report: Path | None = None,
    next_command: str | None = None,
    console: Console | None = None,
) -> None:
    """Print the end screen. It fits 24 lines of 80 columns where samples are short; long ones are shown below each other."""
    console = console or Console(highlight=False)
    reason = f", {_plain(summary.reason)}" if summary.reason else ""
    console.print()
    console.print(
        Text.assemble(
            (shorten(_plain(summary.name), 30), "bold"),
            f"  {_plain(summary.algorithm)}, {count(summary.steps, 'step')} in {duration(summary.seconds)}{reason}",
        ),
        overflow="ellipsis",
        no_wrap=True,
    )
    console.print()
    if summary.before or summary.after:
        console.print(_accuracies(summary, console.width))
    else:
        console.print(Text("No evaluation on held-out problems was made.", style="dim"))
    if samples is not None and samples.before:
        console.print()
        if _fit_a_table(samples, console):
            console.print(_samples(samples, console))
        else:
            _show_whole(samples, console)
    console.print()
    # Unwrapped, so that they can be copied whole.
    for word, text in (("checkpoint", checkpoint), ("report", report)):
        if text is not None:
            console.print(Text.assemble((f"{word:<11}", "dim"), _plain(str(text))), soft_wrap=True)
    if next_command is not None:
        console.print(Text.assemble((f"{'next':<11}", "dim"), (_plain(next_command), "bold cyan")), soft_wrap=True)


def _accuracies(summary: Summary, width: int) -> Table:
    # Truncated numbers would mislead: a narrow terminal shows no intervals.
    whole = width >= 78
    table = _table()
    table.add_column("held-out accuracy" if whole else "held-out", no_wrap=True)
    for word in ("before", "after", "change"):
        table.add_column(word, justify="right", no_wrap=True)
    for word in ("sampled", "greedy"):
        before, after = _interval_of(summary.before, word), _interval_of(summary.after, word)
        if before is None and after is None:
            continue
        change = Text("")
        if before and after:
            style = _STYLE.get(verdict(before, after), "dim")
            change = Text(f"{100 * (after.value - before.value):+.1f}{' points' if whole else ''}", style=style)
        table.add_row(word, _format_interval(before, whole), _format_interval(after, whole), change)
    rewards = [None if each is None else each.reward for each in (summary.before, summary.after)]
    if any(each is not None and not 0 <= each <= 1 for each in rewards):  # an accuracy says little about such a reward
        known = [each for each in rewards if each is not None]
        difference = f"{known[1] - known[0]:+.3f}" if len(known) == 2 else ""
        table.add_row("reward", *("-" if each is None else f"{each:.3f}" for each in rewards), difference)
    for course in (each for each in summary.sets if each.measure.startswith("avg@")):
        first, last = course.points[0][1], course.points[-1][1] if len(course.points) > 1 else None
        moved = Text("")
        if last is not None:
            style = _STYLE.get(verdict(first, last), "dim")
            moved = Text(f"{100 * (last.value - first.value):+.1f}{' points' if whole else ''}", style=style)
        name = _plain(f"{course.name} {course.measure}")
        table.add_row(name, _format_interval(first, whole), _format_interval(last, whole), moved)
    return table


def _width_of_a_column(console: Console) -> int:
    return max(8, (min(console.width, 120) - 4) // 3)


def _fit_a_table(samples: Samples, console: Console) -> bool:
    """Whether prompts and responses stand side by side without being cut."""
    width = _width_of_a_column(console) - 2
    texts = [
        text
        for record in (*samples.before[:SHOWN_SAMPLES], *samples.after[:SHOWN_SAMPLES])
        for text in (shown_prompt(record), str(record.get("text") or ""))
    ]
    return all(len(_plain(text)) <= width for text in texts)


def _show_whole(samples: Samples, console: Console) -> None:
    """One or two whole samples of the last stored step: a right and a wrong one if there are both."""
    records = samples.after or samples.before
    step = samples.before_step if samples.after_step is None else samples.after_step
    right = [record for record in records if (number(record, "accuracy") or 0) >= 1]
    wrong = [record for record in records if record not in right]
    chosen = [*right[:1], *wrong[:1]] if right and wrong else list(records)
    console.print(Text(f"samples of step {step}", style="dim"))
    for record in chosen[:_WHOLE_SAMPLES]:
        show_sample(console, record, _LINES_OF_A_TEXT)


def _samples(samples: Samples, console: Console) -> Table:
    table = _table()
    same = [each.get("prompt") for each in samples.before] == [each.get("prompt") for each in samples.after]
    marks = ("✓", "✗") if console.encoding.startswith("utf") else ("+", "-")
    each_width = _width_of_a_column(console)
    headers = [
        "prompt",
        f"step {samples.before_step}",
        *([] if samples.after_step is None else [f"step {samples.after_step}"]),
    ]
    for header in headers:
        table.add_column(header, no_wrap=True, overflow="ellipsis", max_width=each_width)
    before, after = samples.before[:SHOWN_SAMPLES], samples.after[:SHOWN_SAMPLES]
    for index, record in enumerate(before):
        beside = [_mark_correct(after[index], each_width, marks)] if same else []
        table.add_row(
            Text(shorten(_plain(shown_prompt(record)), each_width)), _mark_correct(record, each_width, marks), *beside
        )
    for record in () if same else after:
        table.add_row(Text(shorten(_plain(shown_prompt(record)), each_width)), "", _mark_correct(record, each_width, marks))
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def _mark_correct(record: Record, width: int, marks: tuple[str, str]) -> Text:
    """The text of a sample with a mark for right or wrong, since not everyone sees colours."""
    accuracy = number(record, "accuracy")
    text = Text(shorten(_plain(str(record.get("text") or "")), width - 2))
    if accuracy is None:
        return text
    mark, style = (marks[0], "green") if accuracy >= 1 else (marks[1], "red" if accuracy <= 0 else "yellow")
    return Text.assemble((f"{mark} ", style), text)


def _plain(text: str) -> str:
    return legible(text, one_line=True)


def _format_interval(interval: Interval | None, whole: bool) -> str:
    if interval is None:
        return "-"
    around = f" ({100 * interval.low:.1f} to {100 * interval.high:.1f})" if whole else ""
    return f"{100 * interval.value:.1f} %{around}"


def _interval_of(evaluation: Evaluation | None, word: str) -> Interval | None:
    interval: Interval | None = None if evaluation is None else getattr(evaluation, word)
    return interval
