"""`legato lab failure`: five ways in which a mean over tokens misleads, constructed, and measured in your own model."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from legato.lab import constructed
from legato.lab.constructed import HIDDEN, SHARE, Correlated, Heavy, Quintile
from legato.lab.recorder import Say, facts, recorder_of
from legato.lab.shifts import Shift, shifts
from legato.lab.variance import stack_updates
from legato.pages.experiment import Account, Check, Sheet
from legato.pages.traces import AMBER, BLUE, GREEN, GREY, RED, VIOLET, Figure, figure, line, shares
from legato.run.target import Target

STEPS = 4
LOW, HIGH = 3e-4, 4e-4


def failure(target: Target | None, *, steps: int, say: Say) -> Account:
    """Return the report of all constructed failure modes and, with a target, of their size in its training."""
    lengths, hidden = constructed.heterogeneous_lengths(), HIDDEN
    related, tails = constructed.correlated_tokens(), constructed.heavy_tails()
    ways: list[Shift] = []
    described: dict[str, str] = {"constructed": "without a model"}
    if target is not None:
        policy, source = target.prepare(say)
        ways = shifts(target.resolved, policy, source, steps=steps, say=say)
        described = facts(recorder_of(target.resolved, policy, source)) | {"steps of each way": str(steps)}
        described.pop("a step")
    modes = _measure(ways[0]) if ways else None
    sheets = [_lengths_sheet(lengths), _hidden_sheet(), _related_sheet(related), _tails_sheet(tails)]
    sentences = _sentences(lengths, related, tails)
    if modes is not None:
        sheets = [*_shift_sheets(ways), _measured_lengths(modes["quintiles"]), *sheets]
        sentences = [*_measured_sentences(ways, modes), *sentences]
    return Account(
        name="failure",
        title="Where a mean over tokens misleads",
        about="Length heterogeneity, large shifts hidden in a mean, correlated tokens, large policy shifts and heavy tails:"
        " each is constructed with a known answer, and measured in the training of the model where one is given.",
        facts=described,
        sentences=sentences,
        checks=_checks(lengths, related, tails),
        sheets=sheets,
        figures=_figures(lengths, related, tails, ways, modes),
        data={"hidden": [{"tokens": h.length, "shifted": h.shifted, "log_s": h.log_s} for h in hidden]},
    )


def _measure(way: Shift) -> dict[str, Any]:
    """Measure the failure modes in the training as configured."""
    later = [each for each in way.observed if each.index > 0] or list(way.observed)
    ratios, mask, _ = stack_updates(later)
    lengths = mask.sum(1)
    log_s = ratios.sum(1) / lengths
    advantages = torch.cat([each.advantages for each in later])
    inside = (log_s >= math.log1p(-LOW)) & (log_s <= math.log1p(HIGH))
    largest = ratios.abs().amax(1)
    tokens = ratios[mask]
    squares = tokens.square().sort(descending=True).values.cumsum(0)
    half = int((squares < squares[-1] / 2).sum()) + 1 if len(squares) and float(squares[-1]) > 0 else 0
    return {
        "quintiles": constructed.quintiles(log_s, advantages, lengths) if bool((advantages != 0).any()) else [],
        "inside": float(inside.double().mean()),
        "hidden": float((inside & (largest > 0.1)).double().sum() / inside.sum().clamp(min=1)),
        "largest": float(largest.max()),
        "kurtosis": float(tokens.pow(4).mean() / tokens.square().mean().square()) if len(tokens) else math.nan,
        "half": half / max(1, len(tokens)),
    }


def _checks(lengths: Sequence[Quintile], related: Sequence[Correlated], tails: Sequence[Heavy]) -> list[Check]:
    printed = {(4096, 1): 0.99878004, (32768, 1): 0.99984742, (4096, 8): 0.99028190}
    checks = [
        Check(what=f"lengths, quintile {number + 1}: {word}", expected=expected, measured=measured, tolerance=0.02)
        for number, quintile in enumerate(lengths)
        for word, expected, measured in (
            ("one band", constructed.QUINTILES[number], quintile.one_band),
            ("band c / sqrt(L)", constructed.FAIR_QUINTILES[number], quintile.by_length),
        )
    ]
    checks += [
        Check(what=f"hidden: s of {h.shifted} token(s) at lw = -5 among {h.length:,}", expected=printed[key],
              measured=math.exp(h.log_s), tolerance=5e-9)
        for h in HIDDEN
        if (key := (h.length, h.shifted)) in printed
    ]  # fmt: skip
    # Four standard errors of a share of 4,000.
    error = 4 * math.sqrt(0.3 * 0.7 / 4000)
    checks += [
        Check(what=f"correlated: clipped, {each.process}", expected=each.expected, measured=each.clipped, tolerance=error,
              source="1 - Phi(z / sqrt(gap))")
        for each in related
    ]  # fmt: skip
    checks += [
        Check(what=f"heavy tails: gap at {each.length} tokens", expected=1.0, measured=each.gap, tolerance=0.15)
        for each in tails
    ]
    return checks


def _sentences(lengths: Sequence[Quintile], related: Sequence[Correlated], tails: Sequence[Heavy]) -> list[str]:
    first = tails[0]
    return [
        f"Constructed, one band for log-normal lengths: it clips {SHARE:.0%} of all responses, {lengths[0].one_band:.0%} of"
        f" the shortest fifth and {lengths[-1].one_band:.1%} of the longest; a band c / sqrt(L) clips"
        f" {min(q.by_length for q in lengths):.0%} to {max(q.by_length for q in lengths):.0%} everywhere.",
        "Constructed, hidden shifts: one token at lw = -5 among 32,768 leaves s inside the published band although the"
        " response became 148 times less likely. max |lw| and log W show it; s does not.",
        f"Constructed, correlated tokens: the band that clips {SHARE:.0%} of independent tokens clips"
        f" {related[1].clipped:.0%} where the gap is 3.6, whatever the reason of the gap.",
        f"Constructed, heavy tails: the variance of log s is that of normal tokens, but at {first.length} tokens"
        f" {first.beyond / constructed.NORMAL_BEYOND:.0f} times as many responses lie beyond four deviations; at"
        f" {tails[-1].length} tokens still {tails[-1].beyond / constructed.NORMAL_BEYOND:.0f} times. Bands are set by"
        " empirical quantiles.",
    ]


def _measured_sentences(ways: Sequence[Shift], modes: dict[str, Any]) -> list[str]:
    ends = [(way, way.updates[-1]) for way in ways]
    sentences = [
        "Measured, large shifts, in the last update of a step: "
        + "; ".join(
            f"{way.name}: mean s {end.mean:.3f}, sd(log s) {end.deviation:.3g}, ESS/N {end.effective:.3f},"
            f" {end.clipped:.0%} clipped"
            for way, end in ends
        )
        + ".",
        f"Measured, hidden shifts: {modes['inside']:.0%} of the responses have s inside the published band;"
        f" {modes['hidden']:.0%} of those hold a token with |lw| above 0.1 (the largest of all:"
        f" {modes['largest']:.2f}).",
        f"Measured, heavy tails: kurtosis of lw {modes['kurtosis']:.0f} (normal 3); half of the sum of squares comes from"
        f" {modes['half']:.2%} of the tokens.",
    ]
    if modes["quintiles"]:
        first, last = modes["quintiles"][0], modes["quintiles"][-1]
        sentences.insert(
            1,
            f"Measured, lengths: the band that clips {SHARE:.0%} of all clips {first.one_band:.0%} of the shortest fifth"
            f" ({first.shortest} to {first.longest} tokens) and {last.one_band:.0%} of the longest ({last.shortest} to"
            f" {last.longest}).",
        )
    return sentences


def _lengths_sheet(quintiles: Sequence[Quintile]) -> Sheet:
    rows = tuple(
        (f"{q.shortest:,} to {q.longest:,}", q.responses, constructed.QUINTILES[n], q.one_band,
         constructed.FAIR_QUINTILES[n], q.by_length)
        for n, q in enumerate(quintiles)
    )  # fmt: skip
    return Sheet(
        name="lengths",
        title="Constructed: length heterogeneity",
        note="Log-normal lengths (median 1,000, sigma 1), independent tokens, deviation 0.015; both bands clip 15 % of all.",
        headings=("tokens", "responses", "expected, one band", "one band", "expected, c / sqrt(L)", "c / sqrt(L)"),
        rows=rows,
        shares=("expected, one band", "one band", "expected, c / sqrt(L)", "c / sqrt(L)"),
    )


def _measured_lengths(quintiles: Sequence[Quintile]) -> Sheet:
    return Sheet(
        name="measured-lengths",
        title="Measured: clip rate by length",
        note="Responses with an advantage, updates after the first of each step; bands set to clip 15 % of all.",
        headings=("tokens", "responses", "one band", "c / sqrt(L)"),
        rows=tuple((f"{q.shortest} to {q.longest}", q.responses, q.one_band, q.by_length) for q in quintiles),
        shares=("one band", "c / sqrt(L)"),
    )


def _hidden_sheet() -> Sheet:
    rows = tuple(
        (h.length, h.shifted, h.log_s, math.exp(h.log_s), math.exp(h.log_product), abs(h.shift), h.inside(LOW, HIGH))
        for h in HIDDEN
    )
    return Sheet(
        name="hidden",
        title="Constructed: large shifts hidden in a mean",
        note="So many tokens at lw = -5, the others unmoved. W: the product over tokens.",
        headings=("tokens", "shifted", "log s", "s", "W", "max |lw|", "inside 3e-4/4e-4"),
        rows=rows,
        digits=8,
    )


def _related_sheet(results: Sequence[Correlated]) -> Sheet:
    return Sheet(
        name="correlated",
        title="Constructed: correlated tokens",
        note="512 tokens of deviation 0.02; the band clips 15 % where tokens are independent.",
        headings=("tokens are", "gap", "expected clipped", "clipped"),
        rows=tuple((each.process, each.gap, each.expected, each.clipped) for each in results),
        shares=("expected clipped", "clipped"),
    )


def _tails_sheet(results: Sequence[Heavy]) -> Sheet:
    normal = ("normal", 1.0, constructed.NORMAL_BEYOND, constructed.NORMAL_QUANTILE)
    return Sheet(
        name="heavy-tails",
        title="Constructed: heavy tails",
        note="Student's t with 3 degrees of freedom, scaled to the variance of normal tokens.",
        headings=("tokens", "gap", "|log s| beyond 4 sd", "99.9 % quantile in sd"),
        rows=(normal, *((str(each.length), each.gap, each.beyond, each.quantile) for each in results)),
        shares=("|log s| beyond 4 sd",),
    )


def _shift_sheets(ways: Sequence[Shift]) -> list[Sheet]:
    rows = tuple(
        (way.name, each.index + 1, each.responses, each.mean, each.deviation, each.effective, each.clipped)
        for way in ways
        for each in way.updates
        if each.index % max(1, len(way.updates) // 8) == 0 or each is way.updates[-1]
    )
    return [
        Sheet(
            name="shifts",
            title="Measured: large policy shifts",
            note="By update within a step. Clipped: of responses with an advantage. It tends to one half where nothing but"
            " chance moves a response; above that the policy moves along its advantages faster than the band allows.",
            headings=("way", "update", "responses", "mean s", "sd of log s", "ESS/N of s", "clipped"),
            rows=rows,
            shares=("ESS/N of s", "clipped"),
            digits=4,
        )
    ]


def _figures(
    lengths: Sequence[Quintile],
    related: Sequence[Correlated],
    tails: Sequence[Heavy],
    ways: Sequence[Shift],
    modes: dict[str, Any] | None,
) -> list[Figure]:
    figures: list[Figure | None] = []
    if ways:
        data, drift = (
            [_update_trace(way, key, colour) for way, colour in zip(ways, (BLUE, RED, AMBER), strict=True)]
            for key in ("clipped", "deviation")
        )
        at = {"xaxis": {"title": {"text": "update within the step"}}}
        figures += [
            figure("Clipped by update", "Share of the responses with an advantage.", data, shares("clipped") | at),
            figure("Spread of log s by update", "Standard deviation over responses.", drift,
                   at | {"yaxis": {"title": {"text": "sd of log s"}, "rangemode": "tozero"}}),
        ]  # fmt: skip
    if modes is not None and modes["quintiles"]:
        figures.append(_length_figure("Clip rate by length, measured", modes["quintiles"]))
    figures.append(_length_figure("Clip rate by length, constructed", lengths))
    names = [each.process for each in related]
    figures.append(
        figure(
            "Correlated tokens and the clip",
            "The band clips 15 % of independent tokens (dashed).",
            [
                {
                    "type": "bar",
                    "name": "expected",
                    "x": names,
                    "y": [e.expected for e in related],
                    "marker": {"color": GREY},
                },
                {
                    "type": "bar",
                    "name": "simulated",
                    "x": names,
                    "y": [e.clipped for e in related],
                    "marker": {"color": BLUE},
                },
            ],
            shares("clipped", whole=False)
            | {"xaxis": {"title": {"text": ""}, "type": "category"}, "shapes": [_level_line(SHARE)]},
        )
    )
    x = [float(each.length) for each in tails]
    figures.append(
        figure(
            "Heavy tails of log s",
            "Beyond four standard deviations, which are the same for both.",
            [
                line(x, [each.beyond for each in tails], "Student's t(3) tokens", VIOLET) | {"mode": "lines+markers"},
                line(x, [constructed.NORMAL_BEYOND] * len(x), "normal tokens", GREEN, dash="dash"),
            ],
            {
                "xaxis": {"title": {"text": "tokens"}, "type": "log"},
                "yaxis": {"title": {"text": "share of responses"}, "type": "log", "exponentformat": "power"},
            },
        )
    )
    return [each for each in figures if each is not None]


def _update_trace(way: Shift, key: str, colour: str) -> dict[str, Any]:
    """The trace of `key` by update; updates without a share, because no response had an advantage, are left out."""
    known = [(float(each.index + 1), value) for each in way.updates if math.isfinite(value := getattr(each, key))]
    return line([at for at, _ in known], [value for _, value in known], way.name, colour)


def _length_figure(title: str, quintiles: Sequence[Quintile]) -> Figure | None:
    names = [f"{q.shortest:,} to {q.longest:,}" for q in quintiles]
    data: list[dict[str, Any]] = [
        {"type": "bar", "name": "one band", "x": names, "y": [q.one_band for q in quintiles], "marker": {"color": BLUE}},
        {
            "type": "bar",
            "name": "c / sqrt(L)",
            "x": names,
            "y": [q.by_length for q in quintiles],
            "marker": {"color": GREEN},
        },
    ]
    layout = shares("clipped", whole=False) | {"xaxis": {"title": {"text": "tokens"}, "type": "category"}}
    return figure(title, "Both bands clip 15 % of all (dashed).", data, layout | {"shapes": [_level_line(SHARE)]})


def _level_line(value: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": 0,
        "x1": 1,
        "xref": "paper",
        "y0": value,
        "y1": value,
        "line": {"color": RED, "dash": "dash"},
    }
