"""The tables and sentences of a comparison, from compare.json, for the terminal, the page and compare.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legato.diagnostics.words import count
from legato.pages.report import duration

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of formatted cells; the first column names the rows, the others are numbers."""

    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(results: Results) -> list[Table]:
    """Return the tables: stability over a sweep, scores and costs of each point, and runs that did not end well."""
    listed = [_frontier(results)] if results["frontier"] else []
    for point in results["points"]:
        if point["arms"]:
            listed += [_scores(results, point), _costs(results, point)]
    troubled = [run for run in results["runs"] if run["status"] != "done"]
    if troubled:
        rows = tuple((run["name"], run["status"], run["collapsed"] or run["reason"] or "") for run in troubled)
        note = " ".join(results["definitions"].values())
        listed.append(Table(title="Runs that did not end well", note=note, headings=("run", "status", "why"), rows=rows))
    return listed


def sentences(results: Results) -> list[str]:
    """Return what can be concluded from the seeds, one sentence for each arm and point."""
    waiting = sum(run["status"] in ("waiting", "stopped", "no room") for run in results["runs"])
    lines = (
        [f"{waiting} of {len(results['runs'])} runs are not finished; seeds count once every arm has them."]
        if waiting
        else []
    )
    for point in results["points"]:
        at = f" at {label(point['point'])}" if point["point"] else ""
        lines += [_sentence(arm, pair, results["against"], point, at) for arm, pair in point["pairs"].items()]
    return lines


def _sentence(arm: str, pair: Mapping[str, Any], against: str, point: Mapping[str, Any], at: str) -> str:
    change, around = pair["difference"], pair["difference_interval"]
    by = f"{100 * change:+.1f} points"
    if around is None:
        return f"{arm} ended {by} beside {against}{at} with one seed, which says nothing of other seeds."
    level = f"{100 * pair['level']:.4g} %"
    numbers = f"{by}, {level} {100 * around[0]:+.1f} to {100 * around[1]:+.1f}, {len(point['seeds'])} seeds"
    if around[0] <= 0 <= around[1]:
        return f"{arm} and {against} cannot be told apart{at} ({numbers})."
    return f"{arm} ended {'above' if change > 0 else 'below'} {against}{at} ({numbers})."


def label(point: Mapping[str, Any]) -> str:
    """Return a point of a sweep in words."""
    return ", ".join(
        f"{path} = {value:g}" if isinstance(value, float) else f"{path} = {value}" for path, value in point.items()
    )


def _scores(results: Results, point: Mapping[str, Any]) -> Table:
    against, seeds = results["against"], point["seeds"]
    rows = []
    for arm, summary in point["arms"].items():
        pair = point["pairs"].get(arm)
        rows.append(
            (
                arm,
                _percent(summary["mean"], summary["mean_interval"]),
                _percent(summary["iqm"], summary["iqm_interval"]),
                "" if pair is None else _points(pair["difference"], pair["difference_interval"]),
                "" if pair is None else _plain(pair["probability"], pair["probability_interval"]),
                "" if pair is None else f"{pair['better']} of {len(seeds)}",
            )
        )
    one = " One seed: there are no intervals." if len(seeds) == 1 else ""
    pair = next(iter(point["pairs"].values()), None)
    corrected = (
        f" Beside {against}: {100 * pair['level']:.4g} % each, so that all {pair['comparisons']} hold together in 95 % of"
        " comparisons."
        if pair is not None and pair["comparisons"] > 1
        else ""
    )
    listed = ", ".join(map(str, seeds))
    return Table(
        title="Held-out accuracy at the end" + (f", {label(point['point'])}" if point["point"] else ""),
        note=f"Sampled; over the seeds {listed}, with 95 % intervals (Student's t).{corrected} P: that a run beats a run of"
        f" {against}.{one}",
        headings=("arm", "mean", "interquartile mean", f"beside {against}", f"P(above {against})", "seeds above"),
        rows=tuple(rows),
    )


def _costs(results: Results, point: Mapping[str, Any]) -> Table:
    # Only a mixture of experts has this column.
    shares = {"tokens clipped": "clip_mean", "experts changed": "flip_mean"}
    if all(summary.get("flip_mean") is None for summary in point["arms"].values()):
        del shares["experts changed"]
    rows = tuple(
        (
            arm,
            f"{summary['steps']:,.0f}",
            f"{summary['updates']:,.0f}",
            f"{summary['tokens']:,.0f}",
            duration(summary["seconds"]),
            *("-" if summary[key] is None else f"{summary[key]:.2%}" for key in shares.values()),
            f"{summary['collapsed']} of {len(point['seeds'])}",
            f"{summary['failed']} of {len(point['seeds'])}",
        )
        for arm, summary in point["arms"].items()
    )
    machine = results["machine"]
    return Table(
        title="Cost and stability" + (f", {label(point['point'])}" if point["point"] else ""),
        note=f"Means over seeds. Time: the steps alone, {machine['parallel']} at once,"
        f" {count(machine['threads'], 'thread')} each.",
        headings=("arm", "steps", "updates", "tokens sampled", "time", *shares, "collapsed", "failed"),
        rows=rows,
    )


def _frontier(results: Results) -> Table:
    rows = []
    for each in results["frontier"]:
        last = each["scale"][-1]["value"]
        unbroken = each["breaks"] is None
        largest = "none" if each["largest"] is None else f"{each['largest']:g}"
        if each["largest"] == last and unbroken:
            largest = f"{largest}, the largest tried"
        rows.append(
            (each["arm"], each["axis"], label(each["others"]) or "-", largest, "-" if unbroken else f"{each['breaks']:g}")
        )
    return Table(
        title="Stability frontier",
        note="The largest value up to which no seed collapsed or failed, and the first at which one did.",
        headings=("arm", "option", "with", "stable up to", "breaks at"),
        rows=tuple(rows),
    )


def _percent(value: float, around: Sequence[float] | None) -> str:
    return f"{100 * value:.1f} %" + ("" if around is None else f" ({100 * around[0]:.1f} to {100 * around[1]:.1f})")


def _points(value: float, around: Sequence[float] | None) -> str:
    return f"{100 * value:+.1f}" + ("" if around is None else f" ({100 * around[0]:+.1f} to {100 * around[1]:+.1f})")


def _plain(value: float, around: Sequence[float] | None) -> str:
    return f"{value:.2f}" + ("" if around is None else f" ({around[0]:.2f} to {around[1]:.2f})")
