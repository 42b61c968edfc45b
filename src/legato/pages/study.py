"""`study.html` and `study.md`: the registration of a study, its comparisons and verdict, and the figures."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from legato.diagnostics.statistics.intervals import wilson_interval
from legato.pages.comparison import escape, table_html, tables_markdown, write_files
from legato.pages.comparison_figures import ARMS, DASHES, swept_axis
from legato.pages.comparison_tables import Results, Table
from legato.pages.page import page, plotly_library
from legato.pages.traces import Figure, figure, shares

VERDICTS = {
    "confirmed": "Confirmed: every registered condition holds.",
    "refuted": "Refuted: a registered condition against it holds.",
    "both": "Conditions for and against both hold: see the comparisons.",
    "undecided": "Undecided: neither all conditions for it nor any against it hold.",
    "unfinished": "Unfinished: nothing is compared before every run has ended.",
}


FAILED = ("failed", "unhealthy")
"""Endings that were neither the last step nor a collapse."""


def write_study_page(folder: Path, results: Results) -> None:
    """Write study.html and study.md from the content of study.json."""
    listed = tables(results)
    html = page(
        title=f"{results['title']} - Legato",
        head=_head(results) + "".join(map(table_html, listed)),
        body=_registration(results),
        drawn=figures(results),
        plotly=plotly_library(),
        no_figures="" if results["complete"] else "Curves are shown when the last run has ended.",
    )
    write_files(folder, {"study.html": html, "study.md": markdown(results)})


def markdown(results: Results) -> str:
    """The page as Markdown, without figures."""
    lines = [f"# {results['title']}", "", results["question"], "", f"**{VERDICTS[results['verdict']]}**", ""]
    lines += [f"- {name}: {value}" for name, value in _facts(results).items()]
    return "\n".join([*lines, *tables_markdown(tables(results))]) + "\n"


def tables(results: Results) -> list[Table]:
    """The tables of a study. An unfinished one shows its progress and its power only."""
    if not results["complete"]:
        ended = sum(run["status"] in ("done", "collapsed", "unhealthy", "failed") for run in results["runs"])
        row = (str(ended), str(len(results["runs"])))
        note = "Scores are shown when the last run has ended."
        progress = Table(title="Progress", note=note, headings=("ended", "runs"), rows=(row,))
        return [progress, *_without_room(results), _power(results)]
    runs = _survival(results) if results.get("measure") is None else _measurement_table(results)
    return [_comparisons(results), _endpoints(results), runs, *_failures(results), _power(results)]


def figures(results: Results) -> list[Figure]:
    """Survival by the swept value for each bed; empty before the study is complete or without a sweep of numbers."""
    if not results["complete"] or results.get("measure") is not None:
        return []
    drawn = []
    for axis, values in results["sweep"].items():
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            drawn += [_survival_figure(results, bed, axis) for bed in results["beds"]]
    return [each for each in drawn if each is not None]


def _survival_figure(results: Results, bed: str, axis: str) -> Figure | None:
    traces = []
    for number, (arm, colour) in enumerate(zip(results["arms"], ARMS, strict=False)):
        runs = [run for run in results["runs"] if (run["bed"], run["arm"]) == (bed, arm)]
        if not runs:
            continue
        values = sorted({run["point"][axis] for run in runs})
        counts = [_count_survivors(run for run in runs if run["point"][axis] == value) for value in values]
        share = [alive / total for alive, total in counts]
        ends = [wilson_interval(alive, total) for alive, total in counts]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": arm,
                "x": values,
                "y": share,
                # Arms that survive alike lie on each other: through the dashes of one the other is seen.
                "line": {"color": colour, "width": 2.2, "dash": DASHES[number % len(DASHES)]},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [high - value for (_, high), value in zip(ends, share, strict=True)],
                    "arrayminus": [value - low for (low, _), value in zip(ends, share, strict=True)],
                    "thickness": 1,
                    "width": 3,
                },
            }
        )
    layout = shares("runs that survived") | {"xaxis": swept_axis(axis, results["sweep"][axis])}
    where = f" on {bed}" if bed else ""
    return figure(f"Survival{where}", "Share of seeds that neither collapsed nor failed; Wilson intervals.", traces, layout)


def _count_survivors(runs: Any) -> tuple[int, int]:
    listed = list(runs)
    return sum(run["status"] == "done" for run in listed), len(listed)


def _comparisons(results: Results) -> Table:
    rows = []
    for each in results["comparisons"]:
        low, high = each["interval"]
        censored = sum(mark is not None for marks in each["censored"] for mark in marks)
        rows.append(
            (
                each["name"],
                f"{each['mean']:+.3g}",
                f"{low:+.3g} to {high:+.3g}",
                f"{each['spread']:.2g}",
                f"{each['margin']:g}",
                each["finding"],
                _meaning(each),
                str(censored),
            )
        )
    level = results["comparisons"][0]["level"] if results["comparisons"] else 0.95
    return Table(
        title="Registered comparisons",
        note=f"Paired over {len(results['seeds'])} seeds; Student's t intervals at {level:.2%} each, so that all"
        f" of them hold together in 95 % of studies. The sd is the larger of that between seeds and the error of the"
        f" measurements. Unit: {results['endpoint']['means']}.",
        headings=("comparison", "mean", "interval", "sd", "margin", "finding", "so", "censored"),
        rows=tuple(rows),
    )


def _meaning(each: Mapping[str, Any]) -> str:
    words = []
    if each["confirms"] is not None:
        words.append("confirms" if each["confirms"] else "does not confirm")
    if each["refutes"] is not None:
        words.append("refutes" if each["refutes"] else "does not refute")
    return ", ".join(words) or "-"


def _endpoints(results: Results) -> Table:
    """The endpoint of every term that a comparison names."""
    endpoints: dict[str, tuple[str, ...]] = {}
    for each in results["comparisons"]:
        for place, term in enumerate(each["terms"]):
            at = ", ".join(f"{path} = {value}" for path, value in term["at"].items())
            name = " ".join(
                filter(None, [term["arm"], f"on {term['bed']}" if term["bed"] else "", f"at {at}" if at else ""])
            )
            values = [row[place] for row in each["values"]]
            marks = [row[place] for row in each["censored"]]
            endpoints[name] = (
                name,
                f"{sum(values) / len(values):.4g}",
                f"{min(values):.4g} to {max(values):.4g}",
                f"{marks.count('low')} low, {marks.count('high')} high",
            )
    return Table(
        title="Endpoints",
        note="Over seeds. Censored: the frontier lies below or above all values that were run.",
        headings=("arm", "mean", "by seed", "censored"),
        rows=tuple(endpoints.values()),
    )


def _survival(results: Results) -> Table:
    points: dict[str, Mapping[str, Any]] = {repr(run["point"]): run["point"] for run in results["runs"]}
    rows = []
    for bed in results["beds"]:
        for arm in results["arms"]:
            runs = [run for run in results["runs"] if (run["bed"], run["arm"]) == (bed, arm)]
            if not runs:
                continue
            counts = [_count_survivors(run for run in runs if run["point"] == point) for point in points.values()]
            rows.append((" ".join(filter(None, [bed, arm])), *(f"{alive} of {total}" for alive, total in counts)))
    labels = [
        ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in each.values()) or "all"
        for each in points.values()
    ]
    return Table(title="Runs that survived", note=results["collapse"], headings=("bed and arm", *labels), rows=tuple(rows))


def _failures(results: Results) -> list[Table]:
    """The runs that an error or the health watch ended: in the table of survivors they look as if they had collapsed."""
    rows = tuple((run["name"], run["status"], run["reason"]) for run in results["runs"] if run["status"] in FAILED)
    note = "They count with the last accuracy that they measured, or 0 without one; on a frontier they did not survive."
    return [Table(title="Runs that failed", note=note, headings=("run", "status", "why"), rows=rows)] if rows else []


def _without_room(results: Results) -> list[Table]:
    """The runs of an unfinished study for which a disk or a GPU had no room."""
    rows = tuple((run["name"], run["reason"]) for run in results["runs"] if run["status"] == "no room")
    note = "They do not count until they were run again (--retry-failed)."
    return [Table(title="Runs without room", note=note, headings=("run", "why"), rows=rows)] if rows else []


def _measurement_table(results: Results) -> Table:
    """Mean and range over seeds of every arm at every swept value."""
    rows = []
    for arm in results["arms"]:
        runs = [run for run in results["runs"] if run["arm"] == arm]
        for point in {repr(run["point"]): run["point"] for run in runs}.values():
            values = [run["value"] for run in runs if run["point"] == point]
            at = ", ".join(f"{path} {value:g}" for path, value in point.items())
            rows.append((arm, at, f"{sum(values) / len(values):.4g}", f"{min(values):.4g} to {max(values):.4g}"))
    return Table(
        title="All measurements",
        note=f"Over {len(results['seeds'])} seeds, not corrected for their number.",
        headings=("arm", "at", "mean", "by seed"),
        rows=tuple(rows),
    )


def _power(results: Results) -> Table:
    note = "The chance to find the registered difference at the registered spread, with the seeds of the study."
    headings = ["comparison", "power", "seeds for 80 %"]
    rows = [[each["name"], f"{each['power']:.0%}", str(each["seeds_needed"])] for each in results["power"]]
    chances = [each.get("equivalence") for each in results["power"]]  # absent from results of older versions
    if any(chance is not None for chance in chances):
        note += " Where the rule names it, also the chance to find arms equivalent that do not differ."
        headings.append("equivalent, if nothing differs")
        for row, chance in zip(rows, chances, strict=True):
            row.append("" if chance is None else f"{chance:.0%}")
    return Table(title="Power", note=note, headings=tuple(headings), rows=tuple(map(tuple, rows)))


def _facts(results: Results) -> dict[str, str]:
    return {
        "Registered": _registered(results["registration"]),
        "Seeds": ", ".join(map(str, results["seeds"])) + (" (pilot)" if results["pilot"] else ""),
        "Confirmed if": results["confirmed"],
        "Refuted if": results["refuted"],
        "Written": results["written"],
        **({"Precision": mixed} if (mixed := mixed_precision(results)) else {}),
    }


def mixed_precision(results: Results) -> str:
    """How many runs were made in which precision, and what that means; empty where they share one."""
    precisions = results.get("precision") or {}  # absent from older results
    if len(precisions) < 2:
        return ""
    counted = ", ".join(f"{number} runs in {name}" for name, number in sorted(precisions.items()))
    return f"{counted}; what differs between arms or beds may come from it"


def _registered(registration: Mapping[str, Any]) -> str:
    """The commit of the registration, and whether it came too late."""
    registered, begun = registration["registered"], registration.get("begun")  # `begun` is absent from older results
    if not registered:
        return "not in a commit"
    named = f"{registered['commit'][:12]}, {registered['date']}"
    late = begun is not None and datetime.fromisoformat(registered["date"]) > datetime.fromisoformat(begun)
    return f"{named}, after its first run had begun ({begun})" if late else named


def _head(results: Results) -> str:
    spans = "".join(f"<span>{name} <b>{escape(value)}</b></span>" for name, value in _facts(results).items())
    return (
        f"<header><h1>{escape(results['title'])}</h1><p>{escape(results['question'])}</p>"
        f'<p class="verdict">{VERDICTS[results["verdict"]]}</p><div class="facts">{spans}</div></header>'
    )


def _registration(results: Results) -> str:
    arms = "".join(f"<li><b>{escape(arm)}</b> {escape(_options(options))}</li>" for arm, options in results["arms"].items())
    beds = "".join(f"<li><b>{escape(bed)}</b> {escape(', '.join(files))}</li>" for bed, files in results["beds"].items())
    return f'<section><h2>Arms and beds</h2><div class="card"><ul>{arms}{beds}</ul></div></section>'


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {value}" for path, value in options.items()) or "changes nothing"
