"""From the runs of a study to its verdict: endpoints by seed, paired comparisons, power, and what the registration says."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from legato.compare.outcomes import COUNTED
from legato.compare.registration import Comparison, Study, Term
from legato.diagnostics.statistics.frontier import frontier
from legato.diagnostics.statistics.paired import (
    ERROR_RATE,
    WANTED_POWER,
    Paired,
    compare_pairs,
    equivalence_power,
    power,
    seeds_needed,
)

Outcome = Mapping[str, Any]
Cell = tuple[str, str, int]
"""Arm, bed and seed: the runs of one cell differ in swept values only."""


def is_complete(runs: Sequence[Outcome]) -> bool:
    """Whether every run has ended; before that nothing is compared."""
    return all(run["status"] in COUNTED for run in runs)


def analyse(study: Study, runs: Sequence[Outcome], seeds: Sequence[int]) -> dict[str, Any]:
    """The comparisons of a complete study, and its verdict."""
    cells: dict[Cell, list[Outcome]] = {}
    for run in runs:
        cells.setdefault((run["arm"], run["bed"], run["seed"]), []).append(run)
    compared = [_compare(study, comparison, cells, seeds) for comparison in study.comparisons]
    return {"comparisons": compared, "verdict": _verdict(compared)}


def describe_power(study: Study, seeds: int) -> list[dict[str, Any]]:
    """For each comparison its power with so many seeds, and how many it would need.

    `equivalence`: the chance to find no difference equivalent, at the registered spread; None where no rule asks for that.
    """
    count = len(study.comparisons)
    return [
        {
            "name": each.name,
            "power": power(each.detects, each.spread, seeds, count),
            "wanted": WANTED_POWER,
            "seeds_needed": seeds_needed(each.detects, each.spread, count),
            "equivalence": equivalence_power(each.margin, each.spread, seeds, count)
            if "equivalent" in (*each.confirms_if, *each.refutes_if)
            else None,
        }
        for each in study.comparisons
    ]


def endpoint(study: Study, term: Term, seed: int, cells: Mapping[Cell, Sequence[Outcome]]) -> dict[str, Any]:
    """{"value", "variance", "censored"} of a term at one seed.

    `variance` is that of the measurement itself. `censored` is "low" or "high" where a frontier lies beyond the sweep.
    """
    cell = cells[term.arm, term.bed, seed]
    here = [run for run in cell if all(run["point"][path] == value for path, value in term.at.items())]
    if study.endpoint.kind == "frontier":
        assert study.endpoint.axis is not None
        return frontier({run["point"][study.endpoint.axis]: run["status"] == "done" for run in here})
    (run,) = here
    if study.endpoint.kind == "measured":
        return {"value": run["value"], "variance": 0.0, "censored": None}
    value = run["score"] or 0.0 if study.endpoint.kind == "score" else area(run["evaluations"])
    return {"value": value, "variance": share_variance(value, run["problems"]), "censored": None}


def share_variance(value: float, problems: int | None) -> float:
    """The variance of an accuracy over n problems, shrunk to the middle, since 0 of 48 has an error too."""
    if not problems:
        return 0.0  # runs of old versions did not record it
    count = problems
    share = (value * count + 1) / (count + 2)
    return share * (1 - share) / count


def area(evaluations: Sequence[Mapping[str, Any]]) -> float:
    """The mean accuracy over sampled tokens, by the trapezoid rule."""
    if not evaluations:
        return 0.0
    total = evaluations[-1]["tokens"] - evaluations[0]["tokens"]
    if total <= 0:
        return float(evaluations[-1]["sampled"])
    weighted = [(b["tokens"] - a["tokens"]) * (a["sampled"] + b["sampled"]) / 2 for a, b in pairwise(evaluations)]
    return math.fsum(weighted) / float(total)


def _compare(
    study: Study, comparison: Comparison, cells: Mapping[Cell, Sequence[Outcome]], seeds: Sequence[int]
) -> dict[str, Any]:
    measured = {seed: [endpoint(study, term, seed, cells) for term in comparison.terms] for seed in seeds}
    weights = [term.weight for term in comparison.terms]
    differences = [
        math.fsum(weight * each["value"] for weight, each in zip(weights, values, strict=True))
        for values in measured.values()
    ]
    variances = [
        math.fsum(weight**2 * each["variance"] for weight, each in zip(weights, values, strict=True))
        for values in measured.values()
    ]
    floor = math.sqrt(math.fsum(variances) / len(variances))
    count = len(study.comparisons)
    paired = compare_pairs(differences, comparisons=count, margin=comparison.margin, floor=floor)
    found = finding(paired, weights, [[each["censored"] for each in values] for values in measured.values()])
    return {
        "name": comparison.name,
        "terms": [
            {"arm": term.arm, "bed": term.bed, "at": dict(term.at), "weight": term.weight} for term in comparison.terms
        ],
        "values": [[each["value"] for each in values] for values in measured.values()],
        "censored": [[each["censored"] for each in values] for values in measured.values()],
        "differences": differences,
        "mean": paired.mean,
        "interval": [paired.low, paired.high],
        "level": 1 - ERROR_RATE / count,
        "spread": paired.spread,
        "margin": comparison.margin,
        "verdict": paired.verdict,
        "finding": found,
        "at_least": comparison.at_least,
        "confirms": _meets(comparison.confirms_if, found, paired, comparison.at_least),
        "refutes": _meets(comparison.refutes_if, found, paired, 0.0),
        "power": power(comparison.detects, comparison.spread, len(seeds), count),
        "power_at_measured_spread": power(comparison.detects, paired.spread, len(seeds), count) if paired.spread else 1.0,
    }


def finding(paired: Paired, weights: Sequence[float], censored: Sequence[Sequence[str | None]]) -> str:
    """One of "above", "below", "equivalent" and "undecided".

    A censored frontier is only a bound: a difference counts if the truth can but be further out, and nothing is equivalent
    that was not seen to its end.
    """
    lower = any(_beyond(mark, weight) < 0 for row in censored for mark, weight in zip(row, weights, strict=True))
    higher = any(_beyond(mark, weight) > 0 for row in censored for mark, weight in zip(row, weights, strict=True))
    if paired.verdict == "difference" and paired.mean > 0:
        return "undecided" if lower else "above"
    if paired.verdict == "difference":
        return "undecided" if higher else "below"
    return "undecided" if lower or higher else paired.verdict


def _beyond(mark: str | None, weight: float) -> float:
    """In which direction the true difference may lie beyond the measured one; 0 for a term that is not censored."""
    return 0.0 if mark is None else weight if mark == "high" else -weight


def _meets(wanted: Sequence[str], found: str, paired: Paired, least: float) -> bool | None:
    """Whether a finding is a registered one; a difference must also be at least `least`. None: nothing is registered."""
    if not wanted:
        return None
    return found in wanted and (found == "equivalent" or abs(paired.mean) >= least)


def _verdict(compared: Sequence[Mapping[str, Any]]) -> str:
    """ "confirmed", "refuted", "both" or "undecided"."""
    confirming = [each["confirms"] for each in compared if each["confirms"] is not None]
    confirmed = bool(confirming) and all(confirming)
    refuted = any(each["refutes"] for each in compared)
    if confirmed and refuted:
        return "both"
    return "confirmed" if confirmed else "refuted" if refuted else "undecided"
