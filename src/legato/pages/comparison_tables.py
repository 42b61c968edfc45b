"""The tables and sentences of a comparison, from compare.json, for the terminal, the page and compare.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import Any

from legato.diagnostics.words import count
from legato.pages.report import duration

Results = Mapping[str, Any]

_RARE = Fraction(1, 20)
"""A difference is stated without reserve if seeds of equal arms would agree as well in at most this share of cases."""


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
    waiting = sum(run["status"] in ("waiting", "stopped") for run in results["runs"])
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
    numbers = f"{by}, 95 % {100 * around[0]:+.1f} to {100 * around[1]:+.1f}, {len(point['seeds'])} seeds"
    if around[0] <= 0 <= around[1]:
        return f"{arm} and {against} cannot be told apart{at} ({numbers})."
    ended = f"{arm} ended {'above' if change > 0 else 'below'} {against}{at}"
    if _chance(pair, change > 0) <= _RARE:
        return f"{ended} ({numbers})."
    scores = (point["arms"][each]["scores"] for each in (arm, against))
    apart = [100 * (one - other) for one, other in zip(*scores, strict=True)]
    by = f"{by}; by seed {min(apart):+.1f} to {max(apart):+.1f}"
    return f"{ended} on {_agreement(pair, change > 0, len(apart), by)}."


def _chance(pair: Mapping[str, Any], above: bool) -> Fraction:
    """Return how often seeds of equal arms agree as well by chance, in either direction; ties are not counted."""
    agreeing, differing = pair["better" if above else "worse"], pair["better"] + pair["worse"]
    ways = 2 * sum(comb(differing, each) for each in range(agreeing, differing + 1))
    return min(Fraction(1), Fraction(ways, 2**differing))


def _agreement(pair: Mapping[str, Any], above: bool, seeds: int, by: str) -> str:
    """Say how many seeds agree, and how often chance does the same: an interval of few seeds is too narrow."""
    agreeing, differing = pair["better" if above else "worse"], pair["better"] + pair["worse"]
    level = f" and level on {seeds - differing}" if differing < seeds else ""
    on = f"{agreeing} of {seeds} seeds" if agreeing < seeds else "both seeds" if seeds == 2 else f"all {seeds} seeds"
    share = _chance(pair, above)
    often = "every case" if share == 1 else f"{share.numerator} of {share.denominator} cases"
    which = f"{agreeing}" if agreeing == differing else f"{agreeing} of {differing}"
    return f"{on}{level} ({by}); chance alone makes {which} seeds agree in {often}"


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
    listed = ", ".join(map(str, seeds))
    return Table(
        title="Held-out accuracy at the end" + (f", {label(point['point'])}" if point["point"] else ""),
        note=f"Sampled; over the seeds {listed}, with 95 % intervals. P: that a run beats a run of {against}.{one}",
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
