"""What the numbers of each study mean and what speaks against them, in sentences whose numbers come from the stored file.

The sentences of studies that had not run when they were written say what was measured and what speaks against any conclusion
from it; whoever stores the results adds what they show.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from legato.diagnostics.statistics.frontier import frontier
from legato.diagnostics.statistics.paired import compare_pairs, mean_interval, seeds_needed

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
    """S1. First what was registered, then what was looked at afterwards, then the case for the opposite."""
    first, between, unit, replay = results["comparisons"]
    seeds, low, edge, above = len(results["seeds"]), 3e-5, 2.4e-4, 4.8e-4
    higher, lower = (sum(sign * value > 0 for value in first["differences"]) for sign in (1, -1))
    up, down = (sum(sign * value > 0 for value in replay["differences"]) for sign in (1, -1))
    gspo, grpo = "sequence-narrow", "token-wide"
    gaps = {bed: _paired_scores(results, bed, edge) for bed in results["beds"]}
    beds_apart = [one - two for one, two in zip(gaps["mixture"], gaps["dense"], strict=True)]
    band_of_tokens = _paired_scores(results, "mixture", edge, "token-narrow", grpo)
    unit_at_narrow = _paired_scores(results, "mixture", edge, gspo, "token-narrow")
    spreads = ", ".join(f"{each['spread']:.2f}" for each in results["comparisons"])
    powers = ", ".join(f"{each['power_at_measured_spread']:.0%}" for each in results["comparisons"])
    needed = seeds_needed(1.0, first["spread"], len(results["comparisons"]))

    def alive(bed: str, rate: float) -> str:
        return f"GSPO {_alive(results, bed, gspo, rate)}, GRPO {_alive(results, bed, grpo, rate)}"

    def below_start(bed: str) -> str:
        return f"GRPO {_below_start(results, bed, grpo, edge)}, GSPO {_below_start(results, bed, gspo, edge)}"

    return [
        "**Undecided by the registered rule.** GSPO's largest stable learning rate on the mixture is"
        f" {_with_interval(first)} doublings above GRPO's: higher in {higher} of {seeds} seeds, lower in {lower}, equal in the others. The"
        " interval includes no gap at all, and it includes the doubling that was claimed. A sign test on the seeds that differ has"
        f" p = {2 * 0.5 ** (higher + lower) * sum(math.comb(higher + lower, k) for k in range(min(higher, lower) + 1)):.3g}.",
        *(
            f"Largest stable learning rate on the {bed} bed, geometric mean over {seeds} seeds: {_frontier_means(results, bed)}."
            for bed in results["beds"]
        ),
        f"Runs that survived on the mixture at {_rate(edge)}: {alive('mixture', edge)}; at {_rate(above)}: {alive('mixture', above)}. On the dense twin"
        f" at {_rate(edge)}: {alive('dense', edge)}; at {_rate(above)}: {alive('dense', above)}. The order is the same on both, on the dense twin by a"
        f" single run. Whether the gap is larger on the mixture is not known: {_with_interval(between)} doublings.",
        "The condition against the claim is not met either. At the narrow band the frontier of the sequence ratio is"
        f" {_with_interval(unit)} doublings above that of the token ratio: neither a difference nor equivalent within {unit['margin']:g}.",
        f"Routing Replay moved GRPO's frontier by {_with_interval(replay)} doublings, up in {up} seeds and down in {down}. No effect is seen; one of"
        " less than a doubling either way is not excluded.",
        f"**The power was lower than registered.** A spread between seeds of 0.6 doublings was assumed, which gives {first['power']:.0%} for a"
        f" doubling. The measured spreads are {spreads} in the order of the table, and with them the power was {powers}; {needed} seeds would have"
        " had 80 % for the first comparison. To confirm, the mean gap also had to reach a doubling, which a true gap of just"
        " that size does in half of all studies.",
        "**The sweep was coarse.** Rates are a factor of two apart, so a frontier is known to one doubling and most seeds tie. At three of the six"
        " rates every arm but `sequence-wide` survived, at a fourth none did: only two rates tell arms apart.",
        "### Exploratory: not registered",
        "Intervals in this section are for one comparison at 95 %, unless stated.",
        "**The rule for a collapse hides a decline.** A run counts as stable unless it ends clearly below its start, or clearly below half of its"
        f" best, on 48 problems. Of the stable runs at {_rate(edge)} so many ended below their start: on the mixture {below_start('mixture')}; on"
        f" the dense twin {below_start('dense')}.",
        f"**At {_rate(edge)} GSPO ends higher than GRPO on both beds**: by {_in_points(gaps['mixture'])} points on the mixture and by"
        f" {_in_points(gaps['dense'])} on the dense twin. That the lead is larger on the mixture is not shown: {_in_points(beds_apart)}. This"
        " rate was picked after the results were known, as the one where the arms differ most. Corrected for six rates on two beds the lead is"
        f" {_in_points(gaps['mixture'], 12)} on the mixture, which includes 0, and {_in_points(gaps['dense'], 12)} on the dense twin, which does not.",
        "Other rules for a stable run change the verdict on the first comparison more than the size of the gap. GSPO minus GRPO in"
        " doublings, with intervals at the corrected level of the table; these four rules are all that were tried:",
        *_rules_table(results),
        "By none of them is the mean gap on the mixture a doubling, so none would have confirmed the claim; and by the second the gap is no larger on"
        " the mixture than on the dense twin.",
        f"**A sequence ratio with the wide band is the worst arm by far.** At the lowest rate, {_rate(low)},"
        f" {_alive(results, 'mixture', 'sequence-wide', low)} of its runs survive on the mixture and {_alive(results, 'dense', 'sequence-wide', low)} on the"
        " dense twin. Narrowing the band moves the frontier of the sequence ratio by at least"
        f" {_difference(results, 'mixture', _survived, gspo, 'sequence-wide')} doublings on the mixture and that of the token ratio by"
        f" {_difference(results, 'mixture', _survived, 'token-narrow', grpo)} (at the corrected level). The width of the band matters more than the unit, but for the"
        " sequence ratio only: a sequence ratio without its narrow band is no improvement, and with it has the highest mean frontier of all arms.",
        f"`token-narrow` stands between the published corners. On the mixture at {_rate(edge)} it ends {_in_points(band_of_tokens)} points above GRPO and"
        f" GSPO {_in_points(unit_at_narrow)} above it. At {_rate(low)} it learns less than either.",
        f"`sequence-wide` survived a rate above one at which it had collapsed in {_regained(results, 'sequence-wide')}. Chance decides single runs.",
        "Accuracy at the end, mean over seeds:",
        *_rates_table(results, "score"),
        "At their best rates the arms that learn are within a few points of each other: GSPO's larger stable rate bought little in 15 steps.",
        "Tokens without a gradient, mean over the run:",
        *_rates_table(results, "clip_mean"),
        f"At {_rate(low)} GRPO and `sequence-wide` both clip almost nothing, and only GRPO learns: the few tokens that its clip stops seem to matter, or"
        " the weight of each token does.",
        "Experts that differ from those of the old pass, mean over the 16 updates of a step:",
        *_rates_table(results, "flip_mean", beds=("mixture",)),
        "At equal rates GSPO's runs flip as many experts as GRPO's and survive more often, so the share of flips does not tell who collapses. All shares"
        " are below the published 10 % for a single update.",
        "**GSPO's steps are not smaller.** Standard deviation of the log-ratios of tokens between the old and the updated policy, mean over the run:",
        *_rates_table(results, "ratio/token_log_std", beds=("mixture",), number=True),
        "At equal learning rates the policy moves as far within a step under GSPO as under GRPO, although GSPO clips far more; a likely reason is that"
        " the optimizer rescales gradients. `sequence-wide` moves several times as far at the low rates. Routing Replay keeps ratios closer to 1 at the low rates, and survival"
        " does not follow.",
        f"What 15 steps show is early collapse. Runs at 6e-5 were still rising: mean accuracy at steps 0, 5, 10 and 15 on the mixture was"
        f" {_course(results, 'mixture', grpo, 6e-5)} for GRPO and {_course(results, 'mixture', gspo, 6e-5)} for GSPO. Final accuracies and late"
        " collapses are not seen.",
        "### The opposite case",
        "That the claim holds and the study missed it: in no seed is GRPO's frontier on the mixture above GSPO's. At the edge the accuracies differ by intervals that"
        " exclude 0, as long as they are not corrected. The rule for a collapse is lenient to slow decline, which is what GRPO does there. And on the mixture GRPO's frontier is below that on"
        f" the dense twin in {_lost_to_dense(results, grpo)} of {seeds} seeds, GSPO's in {_lost_to_dense(results, gspo)}, which is the direction of the"
        " paper. More seeds on a finer sweep could confirm it.",
        "That it has nothing to do with mixtures: by accuracy GSPO leads on the dense twin too, Routing Replay changes nothing, and GSPO's runs flip as many"
        f" experts. The beds also differ in where they start ({_starts(results)}; the recipes mean 25 %), and a run that starts lower is harder to call"
        " collapsed, which makes the dense arms look more stable than they are. The twin is as wide as the active experts only, so it has far fewer weights in"
        " all, and the two differ in more than routing.",
        "That it has nothing to do with the unit: about half of GSPO's tokens have no gradient at the edge, and no arm has a token ratio and that share of"
        " clipped tokens (`token-narrow` clips a fifth of it). A larger stable rate could then be a smaller step under another name; that the policy moves as"
        " far in a step speaks against this.",
        "That the rules moved: after the registration and before any reported seed ran, the interval of an accuracy of 0 was widened, which makes a"
        f" collapse harder to call. It changed nothing here: {_ended_at_zero(results)} runs that ended at 0 count as stable.",
        "That this reading follows the data: a first one was written before the results (`benchmarks/readings.py` at commit bc7332a) and was replaced once they"
        " were known. It expected a narrow band to be a smaller step, which the table of log-ratios does not show, and the gap between the beds to scatter much"
        " more than the gap on one bed, which it does not. The choice of tables and of the rate 2.4e-4 came after the results.",
        "That it says little about practice: one task of exact counting, models of a few million weights or fewer, one shape of batch. Sums on a GPU have no"
        " fixed order, so a run near the edge made again may end otherwise; how often was not measured.",
    ]


Rule = Callable[[Mapping[str, Any]], bool]


def _survived(run: Mapping[str, Any]) -> bool:
    """The registered rule: the run did not collapse."""
    return bool(run["status"] == "done")


_OTHER_RULES: dict[str, Rule] = {
    "ends no lower than it began": lambda run: run["score"] >= run["start"],
    "ends 5 points above its start": lambda run: run["score"] >= run["start"] + 0.05,
    "ends above half of its best, without intervals": lambda run: run["score"] >= run["best"] / 2,
    "ends above 2 %": lambda run: run["score"] > 0.02,
}
"""Rules for a stable run that somebody might have registered; all that were tried are shown."""


def _runs_at(results: Results, bed: str, arm: str, rate: float) -> list[Mapping[str, Any]]:
    axis = results["endpoint"]["axis"]
    return [run for run in results["runs"] if _cell(run)[:2] == (bed, arm) and run["point"][axis] == rate]


def _frontiers(results: Results, bed: str, arm: str, stable: Rule = _survived) -> list[dict[str, Any]]:
    """The frontier of each seed by a rule; empty if the arm did not run on the bed."""
    axis = results["endpoint"]["axis"]
    cells = [
        {run["point"][axis]: stable(run) for run in results["runs"] if _cell(run) == (bed, arm, seed)}
        for seed in results["seeds"]
    ]
    return [frontier(cell) for cell in cells] if all(cells) else []


def _frontier_means(results: Results, bed: str) -> str:
    """The geometric mean of the frontiers of each arm, and how many seeds lie beyond the sweep."""
    words = []
    for arm in results["arms"]:
        seeds = _frontiers(results, bed, arm)
        if not seeds:
            continue
        mean = 2 ** (math.fsum(each["value"] for each in seeds) / len(seeds))
        counts = {
            word: sum(each["censored"] == mark for each in seeds) for mark, word in (("low", "below"), ("high", "above"))
        }
        marks = [f"{count} {word} the sweep" for word, count in counts.items() if count]
        words.append(f"{arm} {_rate(mean)}{f' ({chr(44).join(marks)})' if marks else ''}")
    return ", ".join(words)


def _difference(results: Results, bed: str, stable: Rule, arm: str = "sequence-narrow", other: str = "token-wide") -> str:
    """The mean difference of two arms' frontiers by a rule, with the interval that the analysis would give it."""
    pairs = list(zip(_frontiers(results, bed, arm, stable), _frontiers(results, bed, other, stable), strict=True))
    floor = math.sqrt(math.fsum(one["variance"] + two["variance"] for one, two in pairs) / len(pairs))
    differences = [one["value"] - two["value"] for one, two in pairs]
    paired = compare_pairs(differences, comparisons=len(results["comparisons"]), margin=1.0, floor=floor)
    return f"{paired.mean:+.2f} ({paired.low:+.2f} to {paired.high:+.2f})"


def _alive(results: Results, bed: str, arm: str, rate: float) -> str:
    runs = _runs_at(results, bed, arm, rate)
    return f"{sum(map(_survived, runs))} of {len(runs)}"


def _below_start(results: Results, bed: str, arm: str, rate: float) -> str:
    """How many of the stable runs ended below their start."""
    runs = [run for run in _runs_at(results, bed, arm, rate) if _survived(run)]
    return f"{sum(run['score'] < run['start'] for run in runs)} of {len(runs)}"


def _paired_scores(
    results: Results, bed: str, rate: float, arm: str = "sequence-narrow", other: str = "token-wide"
) -> list[float]:
    """Differences of the accuracy at the end by seed."""
    ends = [{run["seed"]: run["score"] or 0.0 for run in _runs_at(results, bed, each, rate)} for each in (arm, other)]
    return [ends[0][seed] - ends[1][seed] for seed in results["seeds"]]


def _in_points(differences: Sequence[float], comparisons: int = 1) -> str:
    """A mean difference in points with its interval, at 95 % for all comparisons together."""
    low, high = mean_interval(differences, comparisons) or (math.nan, math.nan)
    return f"{100 * math.fsum(differences) / len(differences):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _with_interval(comparison: Mapping[str, Any]) -> str:
    low, high = comparison["interval"]
    return f"{comparison['mean']:+.2f} ({low:+.2f} to {high:+.2f})"


def _rate(value: float) -> str:
    """2.4e-4 for 0.00024."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _rules_table(results: Results) -> list[str]:
    rules = {"registered: did not collapse": _survived, **_OTHER_RULES}
    beds = list(results["beds"])
    rows = [f"| {name} | {' | '.join(_difference(results, bed, rule) for bed in beds)} |" for name, rule in rules.items()]
    return [f"| a run is stable if it | {' | '.join(beds)} |", "|---" * (1 + len(beds)) + "|", *rows]


def _rates_table(results: Results, key: str, beds: Sequence[str] | None = None, *, number: bool = False) -> list[str]:
    """The mean over seeds by arm and swept value: a share in per cent, or a number."""
    rates = results["sweep"][results["endpoint"]["axis"]]
    rows = []
    for bed in beds or results["beds"]:
        for arm in results["arms"]:
            runs = [_runs_at(results, bed, arm, rate) for rate in rates]
            if all(runs):
                means = [math.fsum(run[key] or 0.0 for run in each) / len(each) for each in runs]
                cells = [f"{mean:.2g}" if number else f"{100 * mean:.1f} %" for mean in means]
                rows.append(f"| {bed} {arm} | {' | '.join(cells)} |")
    return [f"| bed and arm | {' | '.join(map(_rate, rates))} |", "|---" * (1 + len(rates)) + "|", *rows]


def _course(results: Results, bed: str, arm: str, rate: float) -> str:
    """The mean accuracy at each evaluation, in per cent."""
    rows = zip(*(run["evaluations"] for run in _runs_at(results, bed, arm, rate)), strict=True)
    return ", ".join(f"{100 * math.fsum(each['sampled'] for each in row) / len(row):.1f}" for row in rows) + " %"


def _ended_at_zero(results: Results) -> int:
    """Stable runs without a single right answer at the end."""
    return sum(_survived(run) and run["score"] == 0 for run in results["runs"])


def _starts(results: Results) -> str:
    """The mean accuracy before training, by bed."""
    starts = {bed: [run["start"] for run in results["runs"] if run["bed"] == bed] for bed in results["beds"]}
    return ", ".join(f"{bed} {100 * math.fsum(each) / len(each):.1f} %" for bed, each in starts.items())


def _regained(results: Results, arm: str) -> str:
    """In how many seeds an arm survived a rate above one at which it had collapsed."""
    words = []
    axis = results["endpoint"]["axis"]
    for bed in results["beds"]:
        count = 0
        for seed in results["seeds"]:
            runs = sorted(
                (run for run in results["runs"] if _cell(run) == (bed, arm, seed)), key=lambda run: run["point"][axis]
            )
            count += any(not _survived(one) and _survived(two) for one, two in pairwise(runs))
        words.append(f"{count} of {len(results['seeds'])} seeds on {bed}")
    return " and ".join(words)


def _lost_to_dense(results: Results, arm: str) -> int:
    """Seeds whose frontier is lower on the mixture than on the dense twin."""
    pairs = zip(_frontiers(results, "mixture", arm), _frontiers(results, "dense", arm), strict=True)
    return sum(one["value"] < two["value"] for one, two in pairs)


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
