"""`legato lab clipping`: clipping for epsilon from 1e-6 to 0.2 against the prediction for a normal log s, and its effects
on training: reward, drift, lengths, updates, token against sequence ratios."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.compare.outcomes import NO_ROOM
from legato.diagnostics.statistics.clipping import predicted_clip_fraction
from legato.diagnostics.words import count
from legato.lab.recorder import Say, target_of
from legato.lab.sweep import FURTHER_STEPS, Arm, Course, arms, course, inspect_run, train_arms
from legato.pages.experiment import Account, Check, Sheet, Value
from legato.pages.traces import AMBER, BLUE, GREEN, GREY, RED, UPDATES, VIOLET, Figure, Trace, figure, line, shares
from legato.records.directory import RunDirectory

TOLERANCE = 0.25
"""Largest difference between measured and predicted share, as a share of the predicted one, at which the page still says
that the formula holds. An absolute tolerance would pass any small share, twice or half of what is predicted."""
_DILUTED = (
    "training.load_balance keeps responses without an advantage in the updates; they count as not clipped, so measured"
    " shares are too low by their part."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """Results of an arm over its seeds."""

    arm: Arm
    courses: tuple[Course, ...]
    accuracy: float
    start: float
    collapsed: int
    quintiles: tuple[Mapping[str, Any], ...]
    """Of the first seed."""

    def mean(self, key: str) -> float:
        values = [value for each in self.courses if math.isfinite(value := getattr(each, key))]
        return sum(values) / len(values) if values else math.nan

    def by_update(self) -> list[float]:
        columns = zip(*(each.by_update for each in self.courses), strict=False)
        return [sum(values) / len(values) for values in columns]


def clipping(
    words: Sequence[str],
    *,
    epsilons: Sequence[float],
    seeds: Sequence[int],
    steps: int | None,
    folder: Path,
    parallel: int,
    say: Say,
) -> Account:
    """Train all arms (or continue a stopped sweep), measure each, and return the report."""
    listed = arms(epsilons)
    results = train_arms(words, listed, folder=folder, seeds=seeds, steps=steps, parallel=parallel, say=say)
    arm_results = [_arm_result(arm, results, folder, seeds, say) for arm in listed]
    # The runs start from a copy of the weights; show the name of the original model.
    config = target_of(words).resolved.config
    return account(arm_results, {**results, "model": config.policy.model, "load_balance": config.training.load_balance})


def _arm_result(arm: Arm, results: Mapping[str, Any], folder: Path, seeds: Sequence[int], say: Say) -> ArmResult:
    # A run for which there was no room says nothing of its arm.
    runs = [run for run in results["runs"] if run["arm"] == arm.name and run["status"] != NO_ROOM]
    paths = {run["seed"]: folder / "sweep" / "runs" / run["name"] for run in runs if run["status"] in ("done", "collapsed")}
    scores = [run["score"] for run in runs if run["score"] is not None]
    starts = [run["start"] for run in runs if run["start"] is not None]
    first = paths.get(seeds[0])
    measurements = {} if first is None else inspect_run(first, folder / "looks" / f"{first.name}.json", say)
    return ArmResult(
        arm=arm,
        courses=tuple(course(RunDirectory.open(path).metrics(), arm) for path in paths.values()),
        accuracy=sum(scores) / len(scores) if scores else math.nan,
        start=sum(starts) / len(starts) if starts else math.nan,
        collapsed=sum(run["status"] in ("collapsed", "failed") for run in runs),
        quintiles=tuple(measurements.get("quintiles", ())),
    )


def account(arm_results: Sequence[ArmResult], results: Mapping[str, Any]) -> Account:
    """Build the report of a sweep."""
    sweep = [each for each in arm_results if each.arm.name.startswith("sequence-")]
    steps = max((run["steps"] for run in results["runs"]), default=0)
    return Account(
        name="clipping",
        title="The width of the clip",
        about="GSPO trained from the same weights with the band 1 - epsilon to 1 + epsilon for each epsilon, beside the"
        " share that a normal log s of the measured spread would have clipped: one half as epsilon goes to 0, since a"
        " response that moved against its advantage is never clipped, and 0 where epsilon is far above the spread.",
        facts={
            "model": str(results["model"]),
            "task": str(results["task"]),
            "recipe": ", ".join(Path(each).name for each in results["recipes"]) or "defaults",
            "steps": str(steps),
            "seeds": ", ".join(map(str, results["seeds"])),
        },
        sentences=[*_sentences(arm_results, sweep), *([_DILUTED] if results.get("load_balance") else [])],
        checks=_checks(arm_results, sweep),
        sheets=[
            _sweep_sheet(arm_results),
            _update_sheet(arm_results),
            _length_sheet(arm_results),
            _granularity_sheet(arm_results),
        ],
        figures=_figures(arm_results, sweep),
        data={"arms": [_arm_data(each) for each in arm_results]},
    )


def _find_arm(arm_results: Sequence[ArmResult], name: str) -> ArmResult | None:
    return next((each for each in arm_results if each.arm.name == name), None)


def _sentences(arm_results: Sequence[ArmResult], sweep: Sequence[ArmResult]) -> list[str]:
    sentences = []
    gspo, grpo = _find_arm(arm_results, "gspo"), _find_arm(arm_results, "grpo")
    if gspo is not None and grpo is not None:
        more, less = gspo.mean("clipped_tokens"), grpo.mean("clipped_tokens")
        times = f"{more / less:.0f} times as many" if less > 0 else "while GRPO clipped none"
        sentences.append(
            f"GSPO as published left {more:.1%} of the tokens without a gradient, GRPO {less:.3%}: {times}. The reward went"
            f" from {gspo.mean('reward_start'):.2f} in the first fifth of the run to {gspo.mean('reward'):.2f} in the last"
            f" with GSPO, from {grpo.mean('reward_start'):.2f} to {grpo.mean('reward'):.2f} with GRPO; held-out accuracy"
            f" from {gspo.start:.0%} to {gspo.accuracy:.0%} and {grpo.accuracy:.0%}."
        )
    if sweep:
        off = max(sweep, key=lambda each: abs(each.mean("clipped") - each.mean("predicted")))
        sentences += [
            "Clipped after the first update of a step, measured (and predicted): "
            + ", ".join(f"{e.arm.low:g}: {e.mean('clipped'):.1%} ({e.mean('predicted'):.1%})" for e in sweep)
            + ".",
            f"The largest difference is {off.mean('clipped') - off.mean('predicted'):+.1%} at {off.arm.low:g}; the formula"
            " takes log s as normal around 0 and independent of the advantage.",
            f"The spread of s in those updates was {min(e.mean('spread') for e in sweep):.2g} to"
            f" {max(e.mean('spread') for e in sweep):.2g}; the widest band, {sweep[-1].arm.low:g}, clipped"
            f" {sweep[-1].mean('clipped'):.2%} of the responses.",
        ]
        rewards, seeds = [e.mean("reward") for e in sweep], len(sweep[0].courses)
        sentences.append(
            f"Reward at the end was {min(rewards):.2f} to {max(rewards):.2f}; drift (k3) went from"
            f" {min(e.mean('k3') for e in sweep):.2g} to {max(e.mean('k3') for e in sweep):.2g}. The extremes of"
            f" {count(len(sweep), 'arm')} with {count(seeds, 'seed')} are not a best and a worst: `legato compare` tells"
            " arms apart."
        )
    return sentences


def _checks(arm_results: Sequence[ArmResult], sweep: Sequence[ArmResult]) -> list[Check]:
    checks = [
        Check(what=f"clipped at epsilon {each.arm.low:g}", expected=_finite_or_none(each.mean("predicted")),
              measured=_finite_or_none(each.mean("clipped")), tolerance=TOLERANCE, relative=True,
              source="normal log s of the measured spread")
        for each in sweep
    ]  # fmt: skip
    firsts = [by[0] for each in arm_results if (by := each.by_update())]
    if firsts:
        checks.append(
            Check(what="clipped in the first update of a step, any arm", expected=0.0, measured=max(firsts), tolerance=0)
        )
    if sweep:
        checks.append(
            Check(what=f"clipped at the narrowest band, {sweep[0].arm.low:g}", expected=0.5,
                  measured=_finite_or_none(sweep[0].mean("clipped")), tolerance=TOLERANCE, relative=True,
                  source="one half, not all")
        )  # fmt: skip
    return checks


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _sweep_sheet(arm_results: Sequence[ArmResult]) -> Sheet:
    rows = tuple(
        (
            each.arm.name,
            f"{each.arm.low:g}/{each.arm.high:g}",
            _finite_or_none(each.mean("clipped")),
            # The formula predicts clipping of s, not of token ratios.
            _finite_or_none(each.mean("predicted")) if each.arm.algorithm == "gspo" else None,
            *(_finite_or_none(each.mean(key)) for key in ("clipped_tokens", "reward_start", "reward")),
            _finite_or_none(each.accuracy),
            *(_finite_or_none(each.mean(key)) for key in ("k3", "spread", "furthest", "gradient", "entropy", "length")),
            each.collapsed,
        )
        for each in arm_results
    )
    return Sheet(
        name="sweep",
        title="The sweep",
        note="Means over seeds. Clipped: responses with an advantage left without a gradient, in the updates after the first"
        " of a step; under a token ratio those all of whose tokens are. Tokens: of all updates. Reward, entropy, length: the"
        " last fifth of the run. Accuracy: held-out, at the end.",
        headings=("arm", "band", "clipped", "predicted", "tokens clipped", "reward at first", "reward", "accuracy", "k3",
                  "sd of s", "max |lw|", "gradient norm", "entropy", "length", "collapsed"),
        rows=rows,
        shares=("clipped", "predicted", "tokens clipped", "accuracy"),
    )  # fmt: skip


def _update_sheet(arm_results: Sequence[ArmResult]) -> Sheet:
    width = max((len(each.by_update()) for each in arm_results), default=0)
    rows = tuple((each.arm.name, *(each.by_update() + [None] * width)[:width]) for each in arm_results)
    headings = tuple(f"update {number + 1}" for number in range(width))
    return Sheet(
        name="by-update",
        title="Clipped by update within a step",
        note="Responses clipped as a whole. The published 15 % are a mean over the updates; the first clips none.",
        headings=("arm", *headings),
        rows=rows,
        shares=headings,
    )


def _length_sheet(arm_results: Sequence[ArmResult]) -> Sheet:
    rows = list[tuple[Value, ...]]()
    for each in arm_results:
        if each.arm.algorithm == "gspo" and each.quintiles:
            rows.append((each.arm.name, *(q["clipped"] for q in each.quintiles)))
    known = next((each.quintiles for each in arm_results if each.quintiles), ())
    headings = tuple(f"fifth {number + 1}" for number in range(len(known)))
    lengths = ", ".join(f"{q['shortest']} to {q['longest']}" for q in known)
    return Sheet(
        name="by-length",
        title="Clipped by length",
        note=f"{FURTHER_STEPS} further steps of each run, responses in fifths by length, short to long (in the first arm:"
        f" {lengths} tokens).",
        headings=("arm", *headings),
        rows=tuple(row for row in rows if len(row) == len(headings) + 1),
        shares=headings,
    )


def _granularity_sheet(arm_results: Sequence[ArmResult]) -> Sheet:
    rows = []
    for token in (each for each in arm_results if each.arm.algorithm == "grpo"):
        other = _find_arm(arm_results, f"sequence-{token.arm.low:g}")
        if other is None:
            continue
        for word, each in (("sequence", other), ("token", token)):
            values = (each.mean("clipped_tokens"), each.mean("reward"), each.accuracy, each.mean("k3"))
            rows.append((f"{each.arm.low:g}", word, *map(_finite_or_none, values)))
    return Sheet(
        name="granularity",
        title="The same band on token and on sequence ratios",
        note="A token ratio scatters about sqrt(L) times as far as s, so one number for both is two different clips.",
        headings=("epsilon", "ratio", "tokens clipped", "reward", "accuracy", "k3"),
        rows=tuple(rows),
        shares=("tokens clipped", "accuracy"),
    )


def _log_axis(title: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": title}, "type": "log", "exponentformat": "power"}}


def _figures(arm_results: Sequence[ArmResult], sweep: Sequence[ArmResult]) -> list[Figure]:
    x = [each.arm.low for each in sweep]
    spread = [each.mean("spread") for each in sweep if math.isfinite(each.mean("spread"))]
    figures: list[Figure | None] = []
    if spread:
        typical = sorted(spread)[len(spread) // 2]
        fine = [10 ** (-6 + 5.5 * place / 80) for place in range(81)]
        curve = [predicted_clip_fraction(e, e, typical) for e in fine]
        data = [
            line(fine, curve, f"normal, sd {typical:.2g}", GREY, dash="dash"),
            _points(sweep, "predicted", "predicted with the measured spread", AMBER),
            _points(sweep, "clipped", "measured", BLUE),
        ]
        caption = "Responses with an advantage, updates after the first of a step. One half is the limit, not all."
        figures.append(
            figure(
                "Clipped against epsilon", caption, data, shares("clipped", whole=False) | _log_axis("epsilon"), wide=True
            )
        )
    for title, key, colour in (("Reward against epsilon", "reward", GREEN), ("Drift against epsilon", "k3", VIOLET)):
        axis = {"title": {"text": key}} | (
            {"type": "log", "exponentformat": "power"} if key == "k3" else {"rangemode": "tozero"}
        )
        caption = "Mean reward of the last fifth of the run." if key == "reward" else "k3 between old and new policy, mean."
        figures.append(figure(title, caption, [_points(sweep, key, key, colour)], _log_axis("epsilon") | {"yaxis": axis}))
    chosen = [each for each in arm_results if each.by_update()]
    updates = [
        line(
            [float(n + 1) for n in range(len(each.by_update()))], each.by_update(), each.arm.name, UPDATES[i % len(UPDATES)]
        )
        for i, each in enumerate(chosen)
    ]
    at = {"xaxis": {"title": {"text": "update within the step"}}}
    figures.append(
        figure("Clipped by update index", "Responses clipped as a whole.", updates, shares("clipped", whole=False) | at)
    )
    figures.append(_length_figure(arm_results))
    figures.append(_learning_figure(arm_results, x))
    return [each for each in figures if each is not None]


def _points(sweep: Sequence[ArmResult], key: str, name: str, colour: str) -> Trace:
    known = [(each.arm.low, value) for each in sweep if math.isfinite(value := each.mean(key))]
    trace = line([a for a, _ in known], [b for _, b in known], name, colour)
    return trace | {"mode": "lines+markers", "marker": {"color": colour, "size": 9}}


def _length_figure(arm_results: Sequence[ArmResult]) -> Figure | None:
    data: list[Trace] = []
    for each, colour in zip(
        (e for e in arm_results if e.arm.algorithm == "gspo" and e.quintiles), UPDATES * 3, strict=False
    ):
        x = [float(number + 1) for number in range(len(each.quintiles))]
        data.append(line(x, [q["clipped"] for q in each.quintiles], each.arm.name, colour))
    layout = shares("clipped", whole=False) | {"xaxis": {"title": {"text": "fifth of the responses, short to long"}}}
    return figure("Clipped by length", "At the end of each run, of responses with an advantage.", data, layout)


def _learning_figure(arm_results: Sequence[ArmResult], epsilons: Sequence[float]) -> Figure | None:
    wanted = ["gspo", "grpo", *(f"sequence-{e:g}" for e in (epsilons[0], epsilons[-1]))] if epsilons else ["gspo", "grpo"]
    data = []
    for name, colour in zip(wanted, (BLUE, RED, AMBER, GREY), strict=False):
        each = _find_arm(arm_results, name)
        if each is not None and each.courses:
            points = _smooth(each.courses[0].rewards)
            data.append(line([a for a, _ in points], [b for _, b in points], name, colour))
    caption = "Reward of each step, mean of nine steps, first seed."
    return figure("Learning", caption, data, {"yaxis": {"title": {"text": "reward"}, "rangemode": "tozero"}})


def _smooth(points: Sequence[tuple[float, float]], window: int = 9) -> list[tuple[float, float]]:
    half = window // 2
    averages = []
    for place, (step, _) in enumerate(points):
        near = [value for _, value in points[max(0, place - half) : place + half + 1]]
        averages.append((step, sum(near) / len(near)))
    return averages


def _arm_data(each: ArmResult) -> dict[str, Any]:
    keys = (
        "clipped",
        "predicted",
        "clipped_tokens",
        "reward_start",
        "reward",
        "k3",
        "spread",
        "furthest",
        "gradient",
        "entropy",
        "length",
    )
    return {
        "arm": each.arm.name,
        "algorithm": each.arm.algorithm,
        "low": each.arm.low,
        "high": each.arm.high,
        **{key: each.mean(key) for key in keys},
        "accuracy": each.accuracy,
        "start": each.start,
        "collapsed": each.collapsed,
        "by_update": each.by_update(),
        "quintiles": [dict(q) for q in each.quintiles],
        "seeds": len(each.courses),
    }
