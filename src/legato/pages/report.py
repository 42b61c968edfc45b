"""Writes `report.html`: a run in one offline file that loads nothing and runs no code from the run."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.pages.figures import figures
from legato.pages.health import health_section, health_words
from legato.pages.legible import legible, shorten
from legato.pages.page import page, plotly_library
from legato.pages.summary import Evaluation, Interval, Record, Samples, Summary, number, samples, summarise, summary
from legato.pages.token_figures import token_figures
from legato.pages.turns import transcript
from legato.records.directory import RunDirectory
from legato.records.lines import RunDirectoryError

__all__ = ["Summary", "duration", "summary", "write_report"]

_SHOWN_SAMPLES = 6
_LONGEST_TEXT = 4000


def write_report(directory: RunDirectory) -> Path:
    """Write `report.html` from the records in the run directory. Missing parts are left out."""
    records, health = directory.metrics(), directory.health.read()
    run = summarise(records, directory.name)
    start = next((record for record in records if record.get("kind") == "start"), {})
    text = page(
        title=f"{legible(run.name, one_line=True)} - Legato",
        head=_head(run, health_words(health)),
        body="\n".join(
            [
                _sets(run),
                health_section(health) if _steps(records) else "",
                _samples(directory),
                transcript(directory),
                _list(
                    "Deviations from the paper",
                    start.get("deviations"),
                    "None: every value that the paper sets is the paper's.",
                ),
                _probes(records),
                _list("Notes", start.get("notes"), None),
                _config(directory),
                _environment(directory),
            ]
        ),
        drawn=[*figures(records), *token_figures(directory, _steps(records))],
        plotly=plotly_library(),
    )
    partial = directory.report_path.with_name(".report.html.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(directory.report_path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {directory.report_path}: {error.strerror or error}") from error
    return directory.report_path


def _steps(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.get("kind") == "step"]


def duration(seconds: float) -> str:
    """Format seconds for people: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def verdict(before: Interval | None, after: Interval | None) -> str:
    """Say how accuracy changed between two measurements, as far as their intervals allow."""
    if before is None or after is None:
        return "measured once"
    if after.low > before.high:
        return "rose"
    if after.high < before.low:
        return "fell"
    return "did not change beyond the 95 % intervals"


def _head(run: Summary, health: str) -> str:
    facts = [
        ("model", run.model),
        ("algorithm", run.algorithm),
        ("steps", f"{run.steps:,}"),
        ("time", duration(run.seconds)),
        ("ended", run.reason or "no end recorded"),
        ("health", health),
    ]
    spans = "".join(f"<span>{name} <b>{_safe(value)}</b></span>" for name, value in facts)
    tiles = "".join(_tile(run, word) for word in ("greedy", "sampled"))
    return (
        f'<header><h1>{_safe(run.name)}</h1><div class="facts">{spans}</div>'
        f'<p class="verdict">{_sentence(run)}</p><div class="grid">{tiles}</div></header>'
    )


def _sentence(run: Summary) -> str:
    if run.before is None and run.after is None:
        return "No evaluation on held-out problems was recorded."
    parts = []
    for word in ("greedy", "sampled"):
        before, after = _accuracy_of(run.before, word), _accuracy_of(run.after, word)
        if before and after:
            parts.append(f"{word} accuracy {verdict(before, after)}: {_percent(before)} &rarr; {_percent(after)}")
        elif before or after:
            only = before or after
            assert only is not None
            when = "before training" if before else "at the end"
            parts.append(f"{word} accuracy {_percent(only)} {when}")
    return f"On held-out problems, {'; '.join(parts)}."


def _tile(run: Summary, word: str) -> str:
    before, after = _accuracy_of(run.before, word), _accuracy_of(run.after, word)
    if before is None and after is None:
        return ""
    ends = [(run.before, before), (run.after, after)]
    shown = [(evaluation, interval) for evaluation, interval in ends if evaluation is not None and interval is not None]
    values = ' <span class="dim">&rarr;</span> '.join(_percent(interval) for _, interval in shown)
    change = ""
    if before and after:
        points = 100 * (after.value - before.value)
        course = verdict(before, after)
        kind = course if course in ("rose", "fell") else "dim"
        change = f'<span class="change {kind}">{points:+.1f} points</span>'
    intervals = ", then ".join(f"{100 * each.low:.1f} to {100 * each.high:.1f} %" for _, each in shown)
    at = ", then ".join(f"step {evaluation.step}" for evaluation, _ in shown)
    problems = next((evaluation.problems for evaluation, _ in reversed(shown) if evaluation.problems), None)
    count = f"; {problems:,} problems" if problems else ""
    best = _accuracy_of(run.best, word)
    best_words = f"; best {_percent(best)} at step {run.best.step}" if best and run.best and len(shown) > 1 else ""
    label = "greedy" if word == "greedy" else "sampled at the run's temperature"
    return (
        f'<div class="card tile"><div class="label">Held-out accuracy, {label}</div>'
        f'<div class="big">{values}{change}</div>'
        f'<div class="label">95 % interval {intervals} ({at}{count}{best_words})</div></div>'
    )


def _sets(run: Summary) -> str:
    """The evaluation sets: a row for each measure, before, at best and at the end."""
    if not run.sets:
        return ""
    rows = []
    for course in run.sets:
        (first_step, first), (last_step, last) = course.points[0], course.points[-1]
        best_step, best = max(course.points, key=lambda point: point[1].value)
        cells = [
            f'{_around(each)} <span class="dim">step {step}</span>'
            for step, each in ((first_step, first), (best_step, best), (last_step, last))
        ]
        problems = "" if course.problems is None else f"{course.problems:,}"
        names = [_safe(course.name), _safe(course.measure), problems]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (*names, *cells)) + "</tr>")
    headings = "".join(f"<th>{word}</th>" for word in ("set", "measure", "problems", "first", "best", "last"))
    note = '<p class="dim">95 % intervals over problems in brackets; pass@k is the unbiased estimate.</p>'
    return (
        f'<section><h2>Evaluation sets</h2>{note}<div class="card"><table><tr>{headings}</tr>{"".join(rows)}</table></div>'
        "</section>"
    )


def _around(interval: Interval) -> str:
    return f"{_percent(interval)} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _samples(directory: RunDirectory) -> str:
    try:
        stored = samples(directory, _SHOWN_SAMPLES)
    except (RunDirectoryError, ValueError) as error:
        return f'<section><h2>Samples</h2><p class="bad">{_safe(str(error))}</p></section>'
    if stored.before_step is None:
        return ""
    span = f"step {stored.before_step}" + ("" if stored.after_step is None else f" and step {stored.after_step}")
    note = f'<p class="dim">First rollout of each prompt as stored at {span}; nothing is picked by hand.</p>'
    return f"<section><h2>Samples before and after</h2>{note}{''.join(_pairs(stored))}</section>"


def _pairs(stored: Samples) -> list[str]:
    same = [each.get("prompt") for each in stored.before] == [each.get("prompt") for each in stored.after]
    cards = []
    for index in range(max(len(stored.before), len(stored.after))):
        before = stored.before[index] if index < len(stored.before) else None
        after = stored.after[index] if index < len(stored.after) else None
        first = before or after or {}
        shared = _prompt(first) if same or before is None or after is None else ""
        columns = "".join(
            f"<div>{'' if shared else _prompt(record)}{_rollout(record, step)}</div>"
            for record, step in ((before, stored.before_step), (after, stored.after_step))
            if record is not None
        )
        cards.append(f'<article class="card sample">{shared}<div class="pair">{columns}</div></article>')
    return cards


def _prompt(record: Record) -> str:
    answer = record.get("answer")
    right = "" if answer is None else f' <span class="tag">right answer: <b>{_safe(str(answer))}</b></span>'
    return f'<h3>Prompt{right}</h3><pre dir="auto">{_text(record.get("prompt"))}</pre>'


def _rollout(record: Record, step: int | None) -> str:
    accuracy, reward = number(record, "accuracy"), number(record, "reward")
    word = "unknown" if accuracy is None else "right" if accuracy >= 1 else "wrong" if accuracy <= 0 else f"{accuracy:.2f}"
    kind = word if word in ("right", "wrong") else "dim"
    facts = [f"step {step}", f'<b class="{kind}">{word}</b>']
    facts += [] if reward is None else [f"reward {reward:.3g}"]
    facts += [f"{_safe(str(record[key]))}{unit}" for key, unit in (("tokens", " tokens"), ("stop", "")) if key in record]
    return f'<div class="tag">{" &middot; ".join(facts)}</div><pre dir="auto">{_text(record.get("text"))}</pre>'


def _probes(records: Sequence[Record]) -> str:
    probes = [record for record in records if record.get("kind") == "probe"]
    if not probes:
        return ""
    band = next((each for each in records if each.get("kind") == "step" and number(each, "clip/band_low") is not None), {})
    chosen = probes if len(probes) < 3 else [probes[0], probes[-1]]
    items = "".join(f"<li>{_safe(probe_words(record, band))}</li>" for record in chosen)
    return f'<section><h2>Noise floor</h2><div class="card"><ul>{items}</ul></div></section>'


def probe_words(record: Record, band: Record) -> str:
    """Describe the result of a probe, and what it means for the clip band of the step record `band`."""
    if isinstance(record.get("words"), str):
        return str(record["words"])
    step, count = number(record, "step"), number(record, "responses")
    when = "Before the first step" if not step else f"At step {step:g}"
    of = "responses" if count is None else f"{count:g} responses"
    differences, worst = [], []
    for key, what in (("packs", "scored again in other packs"), ("engine", "as the engine reported them")):
        middle, most = number(record, f"probe/{key}_median"), number(record, f"probe/{key}_max")
        if middle is not None or most is not None:
            sizes = [
                f"{value:.1e} {word}" for value, word in ((middle, "in the median"), (most, "at most")) if value is not None
            ]
            differences.append(f"{of} {what} differed in log s by {' and '.join(sizes)}")
            worst.append(middle if middle is not None else most or 0.0)
    if not differences:
        numbers = [f"{key} {value:.3g}" for key in record if key != "step" and (value := number(record, key)) is not None]
        return f"{when}: {', '.join(numbers) or 'nothing was measured'}."
    edges = [value for key in ("clip/band_low", "clip/band_high") if (value := number(band, key))]
    if not edges:
        return f"{when}, {'; '.join(differences)}."
    share = max(worst) / min(edges)
    meaning = (
        "the clip acts on how the policy moved, not on rounding"
        if share < 0.1
        else "rounding is a visible part of what the clip sees"
        if share < 1
        else "the clip band lies inside the noise: what is clipped is decided by rounding"
    )
    return f"{when}, {'; '.join(differences)}. That is {share:.2%} of the clip band ({min(edges):.1e}): {meaning}."


def _list(title: str, items: Any, otherwise: str | None) -> str:
    lines = [_item(item) for item in items] if isinstance(items, list) else None
    if not lines and (otherwise is None or lines is None):
        return ""
    inside = f"<ul>{''.join(f'<li>{_safe(item)}</li>' for item in lines)}</ul>" if lines else f"<p>{otherwise}</p>"
    return f'<section><h2>{title}</h2><div class="card">{inside}</div></section>'


def _item(item: Any) -> str:
    if isinstance(item, Mapping):
        return ", ".join(f"{key}: {value}" for key, value in item.items())
    return str(item)


def _config(directory: RunDirectory) -> str:
    try:
        text = directory.config_path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    inside = f'<pre class="config">{html.escape(legible(text))}</pre>'
    return f'<section><h2>Resolved config</h2><div class="card">{inside}</div></section>'


def _environment(directory: RunDirectory) -> str:
    try:
        text = directory.environment_path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    inside = f"<details><summary>Versions, hardware, seeds</summary><pre>{html.escape(legible(text))}</pre></details>"
    return f'<section><h2>Environment</h2><div class="card">{inside}</div></section>'


def _accuracy_of(evaluation: Evaluation | None, word: str) -> Interval | None:
    interval: Interval | None = None if evaluation is None else getattr(evaluation, word)
    return interval


def _percent(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} %"


def _safe(text: str) -> str:
    """Escape text for one line of HTML."""
    return html.escape(legible(text, one_line=True))


def _text(value: Any) -> str:
    """Escape and shorten text for a block of HTML."""
    return html.escape(shorten(legible("" if value is None else str(value)), _LONGEST_TEXT))
