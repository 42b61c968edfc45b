"""`legato lab variance`: Var(log s) against length on responses of your model, which explanation fits, and the synthetic
study in which every explanation is known."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from legato.diagnostics.statistics.spread import FEWEST, TELLING, Bin, Spread, spread
from legato.errors import InputError
from legato.lab import synthetic
from legato.lab.recorder import ObservedUpdate, Say, UpdateRecorder, facts, make_recorder
from legato.lab.synthetic import Simulated
from legato.pages.experiment import Account, Check, Sheet, Value
from legato.pages.traces import AMBER, BLUE, GREEN, GREY, RED, VIOLET, Figure, Trace, figure, line
from legato.run.mismatch import restoring_weights
from legato.run.target import Target

STEPS = 40
COLOURS = (GREY, BLUE, VIOLET, GREEN, AMBER, RED)
_NAMES = {"short-range correlation": "kappa", "drift between responses": "tau", "long memory": "Hurst exponent"}


def variance(target: Target | None, *, steps: int, rows: int, say: Say) -> Account:
    """Run the synthetic study and, with a target, the measured one; return the report."""
    say(f"the synthetic study: {rows:,} responses of each length and explanation")
    simulated = synthetic.study(rows)
    recorder, overall, by_index = None, None, list[tuple[int, Spread]]()
    if target is not None:
        recorder = make_recorder(target, say, steps=steps)
        with restoring_weights(recorder.policy):
            for number in range(1, steps + 1):
                recorder.step()
                if number % 10 == 0 or number == steps:
                    say(f"step {number} of {steps}")
        moved = [each for each in recorder.observed if each.index > 0]
        if not moved:
            raise InputError(
                "training.updates_per_step = 1: every ratio is 1; the spread of log s needs several updates a step"
            )
        overall = measure_spread(moved)
        if not overall.bins:
            raise InputError(
                f"{sum(len(each.rows) for each in moved)} responses were seen after the first update of a step; none moved,"
                f" or fewer than {FEWEST} are of about one length: --steps, training.prompts_per_step or training.lr help"
            )
        by_index = [
            (index, measure_spread([each for each in moved if each.index == index]))
            for index in sorted({each.index for each in moved})
        ]
    return _account(recorder, overall, by_index, simulated, rows)


def measure_spread(updates: Sequence[ObservedUpdate]) -> Spread:
    """Measure the spread of log s over updates. The mean of each update is removed."""
    ratios, mask, batch = stack_updates(updates)
    return spread(ratios, mask, batch)


def stack_updates(updates: Sequence[ObservedUpdate]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack updates: log-ratios [n, T], mask [n, T], and the update of each response [n]."""
    width = max(each.mask.shape[1] for each in updates)
    ratios = torch.cat([pad(each.log_ratios, (0, width - each.mask.shape[1])) for each in updates])
    mask = torch.cat([pad(each.mask, (0, width - each.mask.shape[1])) for each in updates])
    batch = torch.cat([torch.full((len(each.rows),), number) for number, each in enumerate(updates)])
    return ratios, mask, batch


def checks(simulated: Sequence[Simulated], rows: int) -> list[Check]:
    """Compare the synthetic study with the closed forms, within four standard errors."""
    results = []
    allowed = 4 * synthetic.slope_error(rows, simulated[0].lengths)
    for each in simulated:
        at = each.lengths.index(synthetic.AT)
        results += [
            Check(what=f"{each.name}: slope", expected=each.expected_slope, measured=each.slope, tolerance=allowed,
                  source="closed form"),
            Check(what=f"{each.name}: gap at {synthetic.AT} tokens", expected=each.expected_gaps[at],
                  measured=each.gaps[at], tolerance=4 * synthetic.gap_error(rows), relative=True, source="closed form"),
        ]  # fmt: skip
    return results


def _account(
    recorder: UpdateRecorder | None,
    overall: Spread | None,
    by_index: Sequence[tuple[int, Spread]],
    simulated: Sequence[Simulated],
    rows: int,
) -> Account:
    sentences, sheets, figures = list[str](), list[Sheet](), list[Figure]()
    data: dict[str, Any] = {"synthetic": [_simulation_data(each) for each in simulated]}
    if recorder is not None and overall is not None:
        where = f"{sum(each.responses for each in overall.bins):,} responses of {recorder.policy.name}"
        sentences += [
            f"{where}: {overall.verdict}.",
            f"Slope of log Var(log s) against log L {overall.slope:.2f} (s.e. {overall.slope_error:.2f}; independent tokens"
            f" -1), gap {overall.gap:.2f} over all lengths (independent 1, published 3.6)."
            f" {_longest_bin_sentence(overall.bins[-1])}",
            f"sigma {overall.sigma:.3g} a token, tau {overall.tau:.3g} between responses, kappa {overall.kappa:.2f} within"
            f" 40 tokens (r_1 {overall.first:.2f}).",
        ]
        sheets += _measured_sheets(overall, by_index)
        figures += _measured_figures(overall)
        data |= {
            "measured": _spread_data(overall),
            "by_update": {str(index): _spread_data(each) for index, each in by_index},
        }
    sentences.append(
        f"Synthetic tokens, each explanation set to a gap of {synthetic.GAP:g} at {synthetic.AT} tokens: slopes "
        + ", ".join(f"{each.name} {each.slope:.3f} (expected {each.expected_slope:.3f})" for each in simulated)
        + "."
    )
    sentences.append(
        "A slope near -1 with a gap above 1 is correlation of short range; a flatter slope is drift between responses or"
        " long memory, and then the variance does not fall as 1/L for long responses. Equal correlation and a random effect"
        " are one thing under two names: both have the same slope."
    )
    return Account(
        name="variance",
        title="Var(log s) against length",
        about="log s is a mean over L tokens. Were they independent, its variance would be sigma^2 / L. The gap is how much"
        " larger it is; how it changes with length tells why.",
        facts={"synthetic responses": f"{rows:,} a length"} if recorder is None else facts(recorder),
        sentences=sentences,
        checks=checks(simulated, rows),
        sheets=[*sheets, *_synthetic_sheets(simulated)],
        figures=[*figures, *_synthetic_figures(simulated)],
        data=data,
    )


def _longest_bin_sentence(last: Bin) -> str:
    where = f"In the longest bin, {last.responses} responses of about {last.length:.0f} tokens, it is {last.gap:.2f}"
    where += f" (s.e. {last.gap_error:.2f})"
    if not last.differs_from_one:
        return f"{where}, which cannot be told from 1."
    return f"{where}: these tokens count as {last.effective_tokens:.1f} independent ones."


def _measured_sheets(overall: Spread, by_index: Sequence[tuple[int, Spread]]) -> list[Sheet]:
    bins = tuple(
        (f"{b.shortest} to {b.longest}", b.responses, b.distinct, b.length, b.variance, b.independent, b.gap, b.gap_error,
         b.effective_tokens)
        for b in overall.bins
    )  # fmt: skip
    fits = tuple((fit.name, _NAMES[fit.name], fit.parameter, fit.misfit) for fit in overall.fits)
    updates = tuple(
        (index + 1, sum(b.responses for b in each.bins), each.sigma, each.tau, each.kappa, each.slope, each.gap)
        for index, each in by_index
    )
    return [
        Sheet(
            name="bins",
            title="Measured, by length",
            note="Updates after the first of each step (there s = 1); the mean of each update is removed. Errors allow for"
            " the heavy tails of log s; responses with the same log s count once.",
            headings=("tokens", "responses", "distinct", "harmonic mean L", "Var(log s)", "sigma^2 / L", "gap", "s.e.",
                      "effective tokens"),
            rows=bins,
        ),
        Sheet(
            name="explanations",
            title="Which explanation fits",
            note="Least squares of log variances over the bins, weighted by their certainty; a difference of"
            f" {TELLING} is telling.",
            headings=("explanation", "parameter", "value", "misfit"),
            rows=fits,
        ),
        Sheet(
            name="by-update",
            title="By update within a step",
            note="Later updates move further; correlation and drift need not be the same.",
            headings=("update", "responses", "sigma", "tau", "kappa", "slope", "gap"),
            rows=updates,
        ),
    ]  # fmt: skip


def _synthetic_sheets(simulated: Sequence[Simulated]) -> list[Sheet]:
    lengths = simulated[0].lengths
    rows = list[tuple[Value, ...]]()
    for each in simulated:
        rows.append((f"{each.name}, expected", *each.expected_gaps, each.expected_slope, None, None))
        rows.append((f"{each.name}, simulated", *each.gaps, each.slope, each.kappa, each.first))
    return [
        Sheet(
            name="synthetic",
            title="The synthetic study: gap by length",
            note=f"Token deviation {synthetic.SIGMA:g}. Every explanation has a gap of {synthetic.GAP:g} at {synthetic.AT}"
            " tokens. kappa: estimated within 40 lags, so that drift and long memory escape it: a kappa far below the gap"
            " points to them.",
            headings=("tokens", *map(str, lengths), "slope", "kappa", "r_1"),
            rows=tuple(rows),
            digits=4,
        )
    ]


def _log_axes(x: str, y: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}, "type": "log"},
        "yaxis": {"title": {"text": y}, "type": "log", "exponentformat": "power"},
        "hovermode": "closest",
    }


def _measured_figures(overall: Spread) -> list[Figure]:
    x = [each.length for each in overall.bins]
    points: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "measured",
        "x": x,
        "y": [b.variance for b in overall.bins],
    }
    points["marker"] = {"color": BLUE, "size": 10}
    points["error_y"] = {"type": "data", "array": [b.variance * b.gap_error / b.gap for b in overall.bins]}
    data = [points, line(x, [b.independent for b in overall.bins], "independent tokens", GREY, dash="dash")]
    data += [
        line(x, list(fit.variances), fit.name, colour, width=1.6)
        for fit, colour in zip(overall.fits, (GREEN, AMBER, VIOLET), strict=False)
    ]
    gaps = {**points, "y": [b.gap for b in overall.bins], "name": "gap"}
    gaps["error_y"] = {"type": "data", "array": [b.gap_error for b in overall.bins]}
    layout = {"xaxis": {"title": {"text": "tokens"}, "type": "log"}, "hovermode": "closest",
              "yaxis": {"title": {"text": "gap"}, "rangemode": "tozero"}}  # fmt: skip
    one = line(x, [1.0] * len(x), "independent", GREY, dash="dash")
    figures = [
        figure("Var(log s) against length", "Bins of responses with their standard errors, and the explanations.", data,
               _log_axes("tokens (harmonic mean of the bin)", "Var(log s)"), wide=True),
        figure("Gap against length", "1 would be independent tokens.", [gaps, one],
               layout),
    ]  # fmt: skip
    return [each for each in figures if each is not None]


def _synthetic_figures(simulated: Sequence[Simulated]) -> list[Figure]:
    data: list[dict[str, Any]] = []
    for each, colour in zip(simulated, COLOURS, strict=True):
        x = [float(length) for length in each.lengths]
        expected = [gap * synthetic.SIGMA**2 / length for gap, length in zip(each.expected_gaps, x, strict=True)]
        data.append(line(x, expected, each.name, colour, width=1.4))
        points = {"type": "scatter", "mode": "markers", "name": each.name, "x": x, "y": list(each.variances)}
        data.append(points | {"marker": {"color": colour, "size": 7}, "showlegend": False})
    caption = "Lines: closed forms; points: simulated. All cross at 512 tokens and part elsewhere."
    chart = figure("Synthetic correlation", caption, data, _log_axes("tokens", "Var(log s)"), wide=True)
    return [] if chart is None else [chart]


def _simulation_data(each: Simulated) -> dict[str, Any]:
    return {
        "name": each.name,
        "lengths": list(each.lengths),
        "gaps": list(each.gaps),
        "expected_gaps": list(each.expected_gaps),
        "slope": each.slope,
        "expected_slope": each.expected_slope,
        "kappa": each.kappa,
        "r_1": each.first,
    }


def _spread_data(spread: Spread) -> dict[str, Any]:
    return {
        "sigma": spread.sigma,
        "tau": spread.tau,
        "kappa": spread.kappa,
        "r_1": spread.first,
        "slope": spread.slope,
        "slope_error": spread.slope_error,
        "gap": spread.gap,
        "verdict": spread.verdict,
        "explanations": {fit.name: {"parameter": fit.parameter, "misfit": fit.misfit} for fit in spread.fits},
    }
