"""What the numbers of each study mean and what speaks against them, in sentences whose numbers come from the stored file.

The sentences of studies that had not run when they were written say what was measured and what speaks against any conclusion
from it; whoever stores the results adds what they show.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from legato.diagnostics.statistics.frontier import frontier
from legato.diagnostics.statistics.paired import compare_pairs

Results = Mapping[str, Any]


def _mean(results: Results, arm: str, key: str = "score", **at: Any) -> float:
    values = [
        run[key]
        for run in results["runs"]
        if run["arm"] == arm and all(run["point"][path.replace("__", ".")] == value for path, value in at.items())
    ]
    return math.fsum(values) / len(values)


def _comparison(results: Results, name: str) -> str:
    each = next(each for each in results["comparisons"] if each["name"] == name)
    low, high = each["interval"]
    return f"{each['mean']:+.3g} ({low:+.3g} to {high:+.3g})"


def _seeds_alone(each: Mapping[str, Any], count: int) -> tuple[float, float, float]:
    """(low, high, sd) of a comparison from the differences between seeds alone, without the error of the held-out problems
    that the analysis takes as the least sd; at the level of the page. Not registered: it says what the floor decides."""
    paired = compare_pairs(each["differences"], comparisons=count, margin=each["margin"], floor=0.0)
    return paired.low, paired.high, paired.spread


def _points(results: Results, place: int) -> str:
    """Seeds alone, in points."""
    low, high, _ = _seeds_alone(results["comparisons"][place], len(results["comparisons"]))
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


def _dose(results: Results) -> list[str]:
    noises = results["sweep"]["training.router_noise"]
    flips = ", ".join(f"{100 * _mean(results, 'grpo', 'flip_mean', training__router_noise=noise):.1f}" for noise in noises)
    ended = sum(run["status"] == "done" for run in results["runs"])
    first = results["comparisons"][0]
    low, high = (100 * end for end in first["interval"])

    def curve(arm: str) -> str:
        return ", ".join(f"{100 * _mean(results, arm, training__router_noise=noise):.1f}" for noise in noises)

    return [
        f"The noise made {flips} % of the active experts flip. {ended} of {len(results['runs'])} runs survived: at these"
        f" doses flips ended"
        " no run.",
        f"At the largest dose GRPO lost {100 * first['mean']:.1f} points in the mean. By the registered analysis a harm of 10"
        f" points is not excluded ({low:+.1f} to {high:+.1f}), so the study neither confirms nor refutes the claim.",
        f"**That verdict rests on an assumption.** The analysis takes as the least sd the error of {first['spread']:.2f} that"
        " 48 held-out problems would have as single, unpaired answers. Seeds alone differ by"
        f" {_seeds_alone(first, len(results['comparisons']))[2]:.3f} (0.08 was registered), and give {_points(results, 0)}: with"
        " them the harm would count as equivalent to none and the claim as refuted. The assumption was made before the"
        " registration.",
        "Routing Replay closed no more than half of the harm at 10 % flips: there was hardly any harm to close.",
        f"GRPO lost more than GSPO at the largest dose by {100 * results['comparisons'][2]['mean']:.1f} points; by seeds alone"
        f" {_points(results, 2)}, which would be a difference, and by the registered analysis it is undecided.",
        "The noise perturbs the gates too. Routing Replay restores the experts and not their gates, so this is not a dose of"
        " flips alone.",
        f"Not registered, so a guess for another study: with the noise GSPO went {curve('gspo')} %, GRPO {curve('grpo')} %.",
        "One bed, a mixture of 2.5 M weights, 150-token answers, one learning rate (6e-5). It says nothing about larger"
        " models.",
        "The opposite case: router noise is symmetric, drawn for each step and held over its 16 updates, while flips in training follow the drift of the"
        " routers; a"
        " harmless dose of the one need not be a harmless dose of the other. And the learning rate is one at which"
        " nothing collapses,"
        " so the claim that flips make GRPO collapse where it would else be near the edge is not tested; the frontier"
        " study is.",
    ]


def _length(results: Results) -> list[str]:
    grown = _comparison(results, "token ratio, 600 tokens minus 40, drift 0.03")
    far = _comparison(results, "token ratio, 600 tokens minus 40, drift 0.1")
    between = _comparison(results, "token minus sequence, 600 tokens, drift 0.03")
    product = _comparison(results, "product ratio, 600 tokens minus 40, drift 0.03")

    def variances(drift: float) -> str:
        return ", ".join(
            f"{_mean(results, 'none', 'variance', length=length, drift=drift):.2g}" for length in results["sweep"]["length"]
        )

    return [
        f"Undecided by the registered rule; both of its conditions point the other way. From 40 to 600 tokens the variance"
        f" that the token ratio adds changes"
        f" by {grown} doublings at drift 0.03 and by {far} at drift 0.1. At 600 tokens the token ratio has less variance"
        f" than the sequence"
        f" ratio ({between}).",
        'The registered rule says "undecided", because it asked whether the growth is above 0 or equivalent to 0 and not'
        " whether it is"
        " below. The change at drift 0.03 and the difference between the ratios are smaller than the margin of 0.25 doublings,"
        " and the first interval ends at almost 0.",
        "The change at drift 0.1 comes mostly from its denominator: the variance without a ratio grows with the drift.",
        "The positive control failed. At drift 0.1 the product of 600 ratios should have a far larger variance; 64 responses"
        " miss its tail. So absent growth is weak evidence, less so for the token ratio, whose weights stay near 1.",
        f"The product of the ratios was expected to be the noisy one; at drift 0.03 its growth is {product}.",
        f"All variances fall with length (without a ratio, drift 0.1: {variances(0.1)} at 40, 150 and 600 tokens), since"
        f" a response's"
        " gradient is a mean over its tokens. The spread of log s falls too, as the sampled log-ratios are averaged;"
        " neither is evidence"
        " for the other.",
        "A likely cause, not tested: a token that the move made unlikely has a large gradient and a ratio far below 1,"
        " so the ratio damps"
        " exactly the largest terms. A sequence ratio, being near 1, does not.",
        "The opposite case: nothing is clipped here, and clipping is where token ratios and sequence ratios differ most;"
        " the model has"
        " two layers; the move is one step of signs for random advantages, which no training makes; the trace of the"
        " covariance is"
        " dominated by few coordinates; and 64 responses measure a heavy-tailed variance badly (the two pilot seeds had"
        " signs of their"
        " own). The study suggests, for this one move, that the ratio alone does not make long responses noisy, not that long responses train well.",
    ]


def _bias(results: Results) -> list[str]:
    exact = max(run["value"] for run in results["runs"] if run["arm"] == "product")
    sines = {
        arm: ", ".join(
            f"{_mean(results, arm, 'value', length=length, drift=0.1):.3f}" for length in results["sweep"]["length"]
        )
        for arm in ("token", "sequence", "none")
    }
    return [
        f"At drift 0.1 the sine of the angle to the exact gradient is {sines['token']} for the token ratio at 2, 4, 6"
        f" and 8 tokens,"
        f" {sines['sequence']} for the sequence ratio and {sines['none']} with no weight at all. The product, which is"
        f" the importance"
        f" weight, has at most {exact:.0e}: the enumeration is right.",
        f"Both registered conditions hold: the token ratio is a biased weight whose bias grows with length"
        f" ({_comparison(results, 'token ratio, 8 tokens minus 2, drift 0.1')}), and it is further off than the sequence"
        f" ratio"
        f" ({_comparison(results, 'token minus sequence, 8 tokens, drift 0.1')}).",
        "The second difference is small: its mean is below the margin of 0.02 that was registered as not mattering, and its"
        " interval ends just above it. Growth with length is not specific to tokens: the sequence ratio and no weight at all"
        " grow as much, and the lead of the sequence ratio does not grow. Each length draws a world of its own, so pairs of"
        " lengths share little."
        " The sequence"
        " ratio is nearly as biased as the token ratio, and both are little better than no weight"
        f" ({_comparison(results, 'no weight minus token ratio, 8 tokens, drift 0.1')}). \"GSPO's ratio is the right"
        f' importance weight" does'
        " not follow.",
        "The opposite case: rewards are independent random numbers, the hardest case for a weight that looks at single"
        " tokens, and"
        " policies are tables of three tokens. With rewards that depend on few tokens the biases may be smaller and in"
        " another order.",
    ]


def _exponent(results: Results) -> list[str]:
    arms = {arm: f"{100 * _mean(results, arm):.1f}" for arm in results["arms"]}
    clips = {arm: f"{100 * _mean(results, arm, 'clip_mean'):.0f}" for arm in results["arms"]}
    start = math.fsum(run["start"] for run in results["runs"]) / len(results["runs"])
    spread = max(each["spread"] for each in results["comparisons"])
    alone = [_seeds_alone(each, len(results["comparisons"]))[2] for each in results["comparisons"]]
    gained = 100 * (math.fsum(run["score"] for run in results["runs"]) / len(results["runs"]) - start)
    return [
        f"From {100 * start:.1f} % the arms reached, in the mean over {len(results['seeds'])} seeds, "
        + ", ".join(f"{arm} {value} %" for arm, value in arms.items())
        + ".",
        f"In 16 steps hardly anything was learned ({gained:+.1f} points in the mean over arms), so the study could hardly"
        " have told the exponents apart; it needs longer runs, not more arms.",
        "Over the whole run "
        + ", ".join(f"{arm} clipped {value} %" for arm, value in clips.items())
        + " of the tokens; the bands were made equal for the first step of two pilot seeds only.",
        f"The sd of {spread:.2f} is the error that 40 held-out problems would have as single answers, which the analysis takes"
        f" as the least; between seeds it is {min(alone):.2f} to {max(alone):.2f}. With it the power for 15 points is"
        f" {min(each['power_at_measured_spread'] for each in results['comparisons']):.0%} to"
        f" {max(each['power_at_measured_spread'] for each in results['comparisons']):.0%}. Five seeds of a tiny model"
        f" say little.",
        "The opposite case: lengths here are 37 to 88 tokens, so the exponents differ by a factor of 2.4 between the"
        " shortest and the longest response; over responses of 100 to 10,000 tokens they would differ by a factor of a hundred. With a = 0 the"
        " gradient of a long"
        " response is larger too, which the optimizer undoes only on average.",
    ]


def _judged(results: Results, unit: str, scale: float = 1.0) -> list[str]:
    """A sentence for each registered comparison: its mean, interval and finding, and how far seeds alone would go."""
    lines = []
    for each in results["comparisons"]:
        low, high = (scale * end for end in each["interval"])
        alone_low, alone_high, alone = _seeds_alone(each, len(results["comparisons"]))
        lines.append(
            f"{each['name'][:1].upper()}{each['name'][1:]}: {scale * each['mean']:+.2g} {unit} ({low:+.2g} to {high:+.2g}), {each['finding']}."
            f" Seeds alone scatter by {scale * alone:.2g} and give {scale * alone_low:+.2g} to {scale * alone_high:+.2g}."
            f" With the measured spread the power for the registered difference is {each['power_at_measured_spread']:.0%}."
        )
    return lines


def _shares(results: Results, key: str = "score", **where: Any) -> str:
    """The mean of a share by arm, in per cent."""
    words = []
    for arm in results["arms"]:
        runs = [
            run for run in results["runs"] if run["arm"] == arm and all(run[name] == value for name, value in where.items())
        ]
        values = [run[key] or 0.0 for run in runs]
        if values:
            words.append(f"{arm} {100 * math.fsum(values) / len(values):.1f} %")
    return ", ".join(words)


def _frontier(results: Results) -> list[str]:
    axis = results["endpoint"]["axis"]
    lines = []
    for bed in results["beds"]:
        words = []
        for arm in results["arms"]:
            cells = [
                {run["point"][axis]: run["status"] == "done" for run in results["runs"] if _cell(run) == (bed, arm, seed)}
                for seed in results["seeds"]
            ]
            if not all(cells):
                continue
            seeds = [frontier(cell) for cell in cells]
            mean = 2 ** (math.fsum(each["value"] for each in seeds) / len(seeds))
            beyond = {mark: sum(each["censored"] == mark for each in seeds) for mark in ("low", "high")}
            marks = [
                f"{count} {word} the sweep"
                for mark, word in (("low", "below"), ("high", "above"))
                if (count := beyond[mark])
            ]
            words.append(f"{arm} {mean:.2g}{f' ({chr(44).join(marks)})' if marks else ''}")
        lines.append(
            f"Largest stable learning rate on {bed}, geometric mean over {len(results['seeds'])} seeds: {', '.join(words)}."
        )
    lines += _judged(results, "doublings")
    for bed in results["beds"]:
        lines.append(
            f"At its best learning rate each arm ended, in the mean, on {bed}: {_best(results, bed)}. A larger stable rate is a gain only if more is learned."
        )
    return [
        *lines,
        "Not registered: the unit of the ratio at the wide band. `sequence-wide` collapsed at almost every rate of the pilot, so its frontier"
        " is a bound, and the 2 x 2 has three corners and a bound.",
        "The registered spread of 0.6 doublings was assumed for all comparisons alike. The gap between the beds has four frontiers in"
        " place of two and scatters more, so its power was overstated.",
        "The opposite case: a narrow band is also a smaller step, since most tokens have no gradient after the first updates, so a larger"
        " stable learning rate may be the same step under another name. A run counts as stable if it holds over 15 steps; a slow"
        " decline is not seen. Collapse is judged on 48 held-out problems. Both beds are models of a few million weights or fewer on one task,"
        " and the mixture flips about 3 % of its experts, not the published 10 %.",
    ]


def _cell(run: Mapping[str, Any]) -> tuple[str, str, int]:
    return run["bed"], run["arm"], run["seed"]


def _best(results: Results, bed: str) -> str:
    """The largest mean accuracy at the end over the swept values, by arm."""
    (axis,) = results["sweep"]
    words = []
    for arm in results["arms"]:
        means = {}
        for value in results["sweep"][axis]:
            scores = [
                run["score"] or 0.0
                for run in results["runs"]
                if _cell(run)[:2] == (bed, arm) and run["point"][axis] == value
            ]
            if scores:
                means[value] = math.fsum(scores) / len(scores)
        if means:
            best = max(means, key=lambda value: means[value])
            words.append(f"{arm} {100 * means[best]:.1f} % at {best:g}")
    return ", ".join(words)


def _mismatch(results: Results) -> list[str]:
    lines = [f"Accuracy at the end, {bed}: {_shares(results, bed=bed)}." for bed in results["beds"]]
    lines.append(
        "Tokens without a gradient, over the whole run: "
        + "; ".join(f"{bed}: {_shares(results, 'clip_mean', bed=bed)}" for bed in results["beds"])
        + "."
    )
    return [
        *lines,
        *_judged(results, "points", 100),
        "GSPO's published band is narrower than the rounding of a bf16 sampler: before any update the share of responses that it"
        " clips for no reason is measured by every run's probe (docs/mismatch.md), and an earlier probe on longer responses found"
        " 37 to 46 % at 3e-4. Whatever the accuracies say, the clip then acts on noise.",
        "The opposite case: noise on weights is not the arithmetic of an 8-bit engine, whose activations and keys are rounded too. A learning"
        " rate at which nothing collapses and 20 steps leave little room for harm to show. And GSPO clips most tokens with an exact sampler"
        " already, so what a mismatch adds is small by construction; a wider band would be another experiment.",
    ]


def _efficiency(results: Results) -> list[str]:
    (bed,) = results["beds"]
    starts = [run["start"] for run in results["runs"]]
    rates = ", ".join(f"{arm} {options['training.lr']:g}" for arm, options in results["arms"].items())
    return [
        f"From {100 * math.fsum(starts) / len(starts):.1f} % the arms ended at {_shares(results, bed=bed)}, at learning rates of {rates}.",
        *_judged(results, "points of mean accuracy", 100),
        "The opposite case: learning rates were chosen on runs of 15 steps, which favour fast starts, from values a factor of two apart; an arm may be"
        " better between them. Equal sampled tokens are not equal work: GSPO skips the backward pass of clipped responses. One bed, one"
        " size, and the paper's claim is about models ten thousand times as large.",
    ]


def _length_trained(results: Results) -> list[str]:
    (axis,) = results["sweep"]
    lines = []
    for bed in results["beds"]:
        starts = [run["start"] for run in results["runs"] if run["bed"] == bed]
        ends = "; ".join(f"{value:g}: {_shares(results, bed=bed, point={axis: value})}" for value in results["sweep"][axis])
        lines.append(
            f"{bed.capitalize()} responses start at {100 * math.fsum(starts) / len(starts):.1f} % and end, by learning rate, at {ends}."
        )
    return [
        *lines,
        *_judged(results, "points", 100),
        "The opposite case: with the same learning rate and the same number of responses, long responses have more tokens in an update, so"
        " lengths differ in more than noise; equal accuracy at the start means a smaller error per token for long responses; 15 steps show the"
        " beginning only; and counting is one task, whose tokens are nearly determined.",
    ]


def _real_model(results: Results) -> list[str]:
    (axis,) = results["sweep"]
    starts = [run["start"] for run in results["runs"]]
    ends = "; ".join(f"{value:g}: {_shares(results, point={axis: value})}" for value in results["sweep"][axis])
    return [
        f"From {100 * math.fsum(starts) / len(starts):.1f} % the arms ended, by learning rate, at {ends}.",
        f"Experts that flipped in an update, by arm: {_shares(results, 'flip_mean')}.",
        *_judged(results, "points", 100),
        "The opposite case: an upcycled mixture has experts that are near copies, so a flip changes little; 25 steps and three seeds find only"
        " differences of 40 points; and the weights are dequantised from 4 bits.",
    ]


def _exponent_again(results: Results) -> list[str]:
    starts, ends = ([run[key] for run in results["runs"]] for key in ("start", "score"))
    gained = 100 * (math.fsum(ends) - math.fsum(starts)) / len(ends)
    return [
        f"From {100 * math.fsum(starts) / len(starts):.1f} % the arms ended at {_shares(results)} ({gained:+.1f} points in the mean over arms).",
        f"Tokens without a gradient, over the whole run: {_shares(results, 'clip_mean')}. The bands were made equal for the first step of two pilot"
        " seeds only.",
        *_judged(results, "points", 100),
        "The opposite case: equal clip fractions at the first step are not equal steps later, and an exponent below 1 weighs long responses more, which"
        " helps or harms by the task; a learning rate chosen for each exponent could change the order. Lengths differ by a factor of ten here"
        " and by far more in practice.",
    ]


READINGS: dict[str, Callable[[Results], list[str]]] = {
    "dose": _dose,
    "length": _length,
    "bias": _bias,
    "exponent": _exponent,
    "frontier": _frontier,
    "mismatch": _mismatch,
    "efficiency": _efficiency,
    "length-trained": _length_trained,
    "real-model": _real_model,
    "exponent-2": _exponent_again,
}
