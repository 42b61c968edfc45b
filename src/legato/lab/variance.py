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
from legato.lab.bed import Bed, Observed, Say, facts, make_bed
from legato.lab.synthetic import Simulated
from legato.pages.experiment import Account, Check, Sheet, Value
from legato.pages.traces import AMBER, BLUE, GREEN, GREY, RED, VIOLET, Figure, Trace, figure, line
from legato.run.mismatch import restoring_weights
from legato.run.target import Target

STEPS = 40
COLOURS = (GREY, BLUE, VIOLET, GREEN, AMBER, RED)
_NAMES = {"short-range correlation": "kappa", "drift between responses": "tau", "long memory": "Hurst exponent"}


def variance(target: Target | None, *, steps: int, rows: int, say: Say) -> Account:
    """Both studies; without a target the synthetic one alone."""
    say(f"the synthetic study: {rows:,} responses of each length and explanation")
    made = synthetic.study(rows)
    bed, found, by_index = None, None, list[tuple[int, Spread]]()
    if target is not None:
        bed = make_bed(target, say, steps=steps)
        with restoring_weights(bed.policy):
            for number in range(1, steps + 1):
                bed.step()
                if number % 10 == 0 or number == steps:
                    say(f"step {number} of {steps}")
        moved = [each for each in bed.seen if each.index > 0]
        if not moved:
            raise InputError(
                "training.updates_per_step = 1: every ratio is 1; the spread of log s needs several updates a step"
            )
        found = measured(moved)
        if not found.bins:
            raise InputError(
                f"{sum(len(each.rows) for each in moved)} responses were seen after the first update of a step; none moved,"
                f" or fewer than {FEWEST} are of about one length: --steps, training.prompts_per_step or training.lr help"
            )
        by_index = [
            (index, measured([each for each in moved if each.index == index]))
            for index in sorted({each.index for each in moved})
        ]
    return _account(bed, found, by_index, made, rows)


def measured(seen: Sequence[Observed]) -> Spread:
    """The spread over some updates; each is a batch whose mean is removed."""
    ratios, mask, batch = stacked(seen)
    return spread(ratios, mask, batch)


def stacked(seen: Sequence[Observed]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratios [n, T], mask, and which update each response is of."""
    width = max(each.mask.shape[1] for each in seen)
    ratios = torch.cat([pad(each.log_ratios, (0, width - each.mask.shape[1])) for each in seen])
    mask = torch.cat([pad(each.mask, (0, width - each.mask.shape[1])) for each in seen])
    batch = torch.cat([torch.full((len(each.rows),), number) for number, each in enumerate(seen)])
    return ratios, mask, batch


def checks(made: Sequence[Simulated], rows: int) -> list[Check]:
    """The synthetic study beside the closed forms; four standard errors are allowed."""
    found = []
    allowed = 4 * synthetic.slope_error(rows, made[0].lengths)
    for each in made:
        at = each.lengths.index(synthetic.AT)
        found += [
            Check(what=f"{each.name}: slope", expected=each.expected_slope, measured=each.slope, tolerance=allowed,
                  source="closed form"),
            Check(what=f"{each.name}: gap at {synthetic.AT} tokens", expected=each.expected_gaps[at],
                  measured=each.gaps[at], tolerance=4 * synthetic.gap_error(rows), relative=True, source="closed form"),
        ]  # fmt: skip
    return found


def _account(
    bed: Bed | None, found: Spread | None, by_index: Sequence[tuple[int, Spread]], made: Sequence[Simulated], rows: int
) -> Account:
    sentences, sheets, figures = list[str](), list[Sheet](), list[Figure]()
    data: dict[str, Any] = {"synthetic": [_told(each) for each in made]}
    if bed is not None and found is not None:
        where = f"{sum(each.responses for each in found.bins):,} responses of {bed.policy.name}"
        sentences += [
            f"{where}: {found.verdict}.",
            f"Slope of log Var(log s) against log L {found.slope:.2f} (s.e. {found.slope_error:.2f}; independent tokens"
            f" -1), gap {found.gap:.2f} over all lengths (independent 1, published 3.6). {_longest(found.bins[-1])}",
            f"sigma {found.sigma:.3g} a token, tau {found.tau:.3g} between responses, kappa {found.kappa:.2f} within 40"
            f" tokens (r_1 {found.first:.2f}).",
        ]
        sheets += _measured_sheets(found, by_index)
        figures += _measured_figures(found)
        data |= {"measured": _plain(found), "by_update": {str(index): _plain(each) for index, each in by_index}}
    sentences.append(
        f"Synthetic tokens, each explanation set to a gap of {synthetic.GAP:g} at {synthetic.AT} tokens: slopes "
        + ", ".join(f"{each.name} {each.slope:.3f} (expected {each.expected_slope:.3f})" for each in made)
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
        facts={"synthetic responses": f"{rows:,} a length"} if bed is None else facts(bed),
        sentences=sentences,
        checks=checks(made, rows),
        sheets=[*sheets, *_synthetic_sheets(made)],
        figures=[*figures, *_synthetic_figures(made)],
        data=data,
    )


def _longest(last: Bin) -> str:
    where = f"In the longest bin, {last.responses} responses of about {last.length:.0f} tokens, it is {last.gap:.2f}"
    where += f" (s.e. {last.gap_error:.2f})"
    if not last.told:
        return f"{where}, which cannot be told from 1."
    return f"{where}: these tokens count as {last.effective_tokens:.1f} independent ones."


def _measured_sheets(found: Spread, by_index: Sequence[tuple[int, Spread]]) -> list[Sheet]:
    bins = tuple(
        (f"{b.shortest} to {b.longest}", b.responses, b.distinct, b.length, b.variance, b.independent, b.gap, b.gap_error,
         b.effective_tokens)
        for b in found.bins
    )  # fmt: skip
    fits = tuple((fit.name, _NAMES[fit.name], fit.parameter, fit.misfit) for fit in found.fits)
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


def _synthetic_sheets(made: Sequence[Simulated]) -> list[Sheet]:
    lengths = made[0].lengths
    rows = list[tuple[Value, ...]]()
    for each in made:
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


def _logs(x: str, y: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}, "type": "log"},
        "yaxis": {"title": {"text": y}, "type": "log", "exponentformat": "power"},
        "hovermode": "closest",
    }


def _measured_figures(found: Spread) -> list[Figure]:
    x = [each.length for each in found.bins]
    points: Trace = {"type": "scatter", "mode": "markers", "name": "measured", "x": x, "y": [b.variance for b in found.bins]}
    points["marker"] = {"color": BLUE, "size": 10}
    points["error_y"] = {"type": "data", "array": [b.variance * b.gap_error / b.gap for b in found.bins]}
    data = [points, line(x, [b.independent for b in found.bins], "independent tokens", GREY, dash="dash")]
    data += [
        line(x, list(fit.variances), fit.name, colour, width=1.6)
        for fit, colour in zip(found.fits, (GREEN, AMBER, VIOLET), strict=False)
    ]
    gaps = {**points, "y": [b.gap for b in found.bins], "name": "gap"}
    gaps["error_y"] = {"type": "data", "array": [b.gap_error for b in found.bins]}
    layout = {"xaxis": {"title": {"text": "tokens"}, "type": "log"}, "hovermode": "closest",
              "yaxis": {"title": {"text": "gap"}, "rangemode": "tozero"}}  # fmt: skip
    one = line(x, [1.0] * len(x), "independent", GREY, dash="dash")
    made = [
        figure("Var(log s) against length", "Bins of responses with their standard errors, and the explanations.", data,
               _logs("tokens (harmonic mean of the bin)", "Var(log s)"), wide=True),
        figure("Gap against length", "1 would be independent tokens.", [gaps, one],
               layout),
    ]  # fmt: skip
    return [each for each in made if each is not None]


def _synthetic_figures(made: Sequence[Simulated]) -> list[Figure]:
    data: list[dict[str, Any]] = []
    for each, colour in zip(made, COLOURS, strict=True):
        x = [float(length) for length in each.lengths]
        expected = [gap * synthetic.SIGMA**2 / length for gap, length in zip(each.expected_gaps, x, strict=True)]
        data.append(line(x, expected, each.name, colour, width=1.4))
        points = {"type": "scatter", "mode": "markers", "name": each.name, "x": x, "y": list(each.variances)}
        data.append(points | {"marker": {"color": colour, "size": 7}, "showlegend": False})
    caption = "Lines: closed forms; points: simulated. All cross at 512 tokens and part elsewhere."
    found = figure("Synthetic correlation", caption, data, _logs("tokens", "Var(log s)"), wide=True)
    return [] if found is None else [found]


def _told(each: Simulated) -> dict[str, Any]:
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


def _plain(found: Spread) -> dict[str, Any]:
    return {
        "sigma": found.sigma,
        "tau": found.tau,
        "kappa": found.kappa,
        "r_1": found.first,
        "slope": found.slope,
        "slope_error": found.slope_error,
        "gap": found.gap,
        "verdict": found.verdict,
        "explanations": {fit.name: {"parameter": fit.parameter, "misfit": fit.misfit} for fit in found.fits},
    }
