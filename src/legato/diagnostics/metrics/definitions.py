"""Every metric: its one definition. `docs/metrics.md` is generated from this table and a test holds it current.

Notation: lw = new - old per token; s = exp(mean of lw over the response); A the advantage; le = old - behaviour; rho = exp(le);
a response is one rollout. "Clipped" means the trust region bounded or dropped the term: its gradient is zero, or, under weight-clip, held at the bound;
"outside" means out of the band whatever A is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Combination = Literal["sum", "max", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What a key means."""

    key: str
    formula: str
    range: str
    bad: str
    """What a bad value looks like and what it says."""
    combines: Combination = "sum"
    """How pieces of several calls become one: added, largest (or smallest) taken, histogram counts added."""


LENGTH_EDGES = (128, 512, 2048, 8192)
"""Responses fall into the bins L < 128, < 512, < 2048, < 8192 and longer: suffixes _bin0 to _bin4."""

_QUANTILES = "suffixes _p01 _p05 _p10 _p50 _p95 _p99"
_LAYERS = "suffixes _layer0 ..: layers with experts, from the first"
_LENGTH_BINS = "suffixes _bin0 .. _bin4: L < 128, < 512, < 2048, < 8192, longer"

METRICS: tuple[Metric, ...] = (
    Metric("loss/total", "the loss: policy term plus penalties", "any", "NaN or inf; for weight-form members the value has no meaning"),
    Metric("loss/policy", "- sum n b keep A r~", "any", "compare with itself only: offset in sapo, meaningless in weight forms"),
    Metric("loss/NAME", "the penalty called NAME, coefficient included", "any", "larger than the policy term: the penalty steers"),
    Metric("ratio/sequence_mean", "mean over responses of s", "> 0", "far from 1 on the first update: anchor and policy are computed differently"),
    Metric("ratio/sequence_std", "population std over responses of s", ">= 0", "far above the clip band: most responses will be clipped"),
    Metric("ratio/sequence_min", "smallest s", "> 0", "near 0: a response became impossible", "max"),
    Metric("ratio/sequence_max", "largest s", "> 0", "far above 1: drift, or an anchor that is too old", "max"),
    Metric("ratio/sequence_log", f"quantiles over responses of log s; {_QUANTILES}", "any", "a median off 0 is drift of the whole policy", "histogram"),
    Metric("ratio/signed_log", f"quantiles of sgn(A) log s over responses with A != 0; {_QUANTILES}", "any", "above log(1 + high): that share is clipped", "histogram"),
    Metric("ratio/token_log_std", "population std over tokens of lw", ">= 0", "above 0.1: updates are large or numerics differ"),
    Metric("ratio/token_log_max", "largest |lw| of a token", ">= 0", "several nats: what averaging over a response hides", "max"),
    Metric("clip/sequences", "responses all of whose tokens are clipped / responses", "[0, 1]", "0: the band never acts; above one half: most work is thrown away"),
    Metric("clip/sequences_positive", "the same among responses with A > 0", "[0, 1]", "much above the negative one: low and high are out of balance"),
    Metric("clip/sequences_negative", "the same among responses with A < 0", "[0, 1]", "as above, the other way"),
    Metric("clip/sequences_length", f"the same per length bin; {_LENGTH_BINS}", "[0, 1]", "short responses clipped more: the band does not fit the lengths"),
    Metric("clip/tokens", "clipped tokens / tokens", "[0, 1]", "for a token ratio a few per mille is usual; for a sequence ratio it is length-weighted"),
    Metric("clip/tokens_positive", "the same among tokens with A > 0", "[0, 1]", "as clip/tokens"),
    Metric("clip/tokens_negative", "the same among tokens with A < 0", "[0, 1]", "as clip/tokens"),
    Metric("clip/outside_sequences", "responses whose ratio is outside the band / responses (sequence ratios)", "[0, 1]", "much above clip/sequences: drift against the advantage"),
    Metric("clip/outside_tokens", "tokens whose ratio is outside the band / tokens", "[0, 1]", "as above"),
    Metric("clip/band_low", "mean over tokens of 1 - exp(lower bound)", ">= 0", "what the band is now, for adaptive and length-scaled bands"),
    Metric("clip/band_high", "mean over tokens of exp(upper bound) - 1", ">= 0", "as above"),
    Metric("clip/beyond_positive", "ratios (of a response, a turn or a token) with A > 0 above the upper bound / ratios with A > 0, each segment counted once; where the band adapts", "[0, 1]", "far from the target of auto-clip for long: the band is at its floor or ceiling"),
    Metric("clip/beyond_negative", "ratios with A < 0 below the lower bound / ratios with A < 0", "[0, 1]", "as above"),
    Metric("clip/reach_positive", "population std over ratios with A > 0 of log r / upper bound; where the band adapts", ">= 0", "about 1 where 15 % of a normal drift is clipped; above 3 for long: the band does not keep up"),
    Metric("clip/reach_negative", "the same with A < 0 and the lower bound", ">= 0", "as above"),
    Metric("gate/mean", "mean over tokens of the soft gate's factor on the gradient", ">= 0", "near 0: the gate is shut"),
    Metric("gate/closed", "tokens with a gate below one half / tokens", "[0, 1]", "near 1: the gate is shut"),
    Metric("coefficient/sequences", "responses with any nonzero coefficient / responses", "[0, 1]", "near 0: nothing is learnt; 1 minus it is what a two-pass update may skip"),
    Metric("keep/tokens", "tokens kept by filters and rejection / tokens", "[0, 1]", "falling: the sampler drifts away from the trainer"),
    Metric("keep/sequences", "responses with a kept token / responses", "[0, 1]", "as above"),
    Metric("keep/sequences_length", f"the same per length bin; {_LENGTH_BINS}", "[0, 1]", "falling with length: the criterion has the length trap of products"),
    Metric("drift/k1", "mean over tokens of -lw: estimates KL(old || new)", "any", "negative on average is noise; large is drift"),
    Metric("drift/k3", "mean over tokens of exp(lw) - 1 - lw (|lw| <= 20)", ">= 0", "above 0.01 within a step: updates are large"),
    Metric("drift/sequence_effective_size", "(sum s)^2 / (N sum s^2)", "(0, 1]", "below 0.9: a few responses carry the update"),
    Metric("drift/token_effective_size", "(sum w)^2 / (T sum w^2), w = exp(lw) (|lw| <= 20)", "(0, 1]", "below 0.9: a few tokens carry the update"),
    Metric("equivalence/perplexity_old", "mean over responses of exp(-mean old)", ">= 1", "rising: responses become unlikely to their own policy"),
    Metric("equivalence/perplexity_new", "mean over responses of exp(-mean new)", ">= 1", "as above"),
    Metric("equivalence/entropy_change", "mean over responses of exp(H_old - H_new), H = -mean log-prob", "> 0", "equals ratio/sequence_mean; the mean of quotients, not the quotient of means"),
    Metric("equivalence/error", "largest |s - PPL_old / PPL_new| / s of a response", ">= 0", "above 1e-12 (float64) or 1e-6 (float32): masks, denominators or temperatures differ", "max"),
    Metric("reference/k1", "mean over tokens of new - ref", "any", "growing without bound: the policy leaves the reference"),
    Metric("reference/k3", "mean over tokens of exp(ref - new) - 1 - (ref - new) (limited to 20)", ">= 0", "as above"),
    Metric("entropy/mean", "mean over tokens of the policy's entropy", ">= 0", "near 0: exploration is over; rising late: the policy dissolves"),
    Metric("value/explained", "1 - Var(R - v) / Var(R) over tokens", "(-inf, 1]", "below 0: the values are worse than a constant"),
    Metric("value/clipped", "tokens whose value moved further than the value clip / tokens", "[0, 1]", "above one half: the values are chasing"),
    Metric("value/moved", "mean over tokens of |v - v_old|", ">= 0", "above the value clip: most value updates are clipped"),
    Metric("mismatch/k1", "mean over tokens of -le: estimates KL(behaviour || old)", "any", "growing: sampler and trainer part ways"),
    Metric("mismatch/k3", "mean over tokens of rho - 1 - le (|le| <= 20)", ">= 0", "rising: stale or wrong weights in the engine"),
    Metric("mismatch/absolute", "mean over tokens of |le|", ">= 0", "above 0.05: more than bf16 explains"),
    Metric("mismatch/max", "largest |le| of a token", ">= 0", "several nats: truncation, temperature or weights differ", "max"),
    Metric("mismatch/chi2_token", "mean over tokens of rho^2, minus 1 (|le| <= 20)", ">= -1", "large: token weights have a heavy tail"),
    Metric("mismatch/chi2_sequence", "mean over responses of P^2, minus 1; P the product of rho (|log P| <= 20)", ">= -1", "grows with length: why product weights fail"),
    Metric("mismatch/effective_size", "(sum rho)^2 / (T sum rho^2) over tokens", "(0, 1]", "below one half: correction costs half the batch"),
    Metric("mismatch/above_two", "tokens with rho > 2 / tokens", "[0, 1]", "per cents: the sampler underrates what the trainer likes"),
    Metric("mismatch/below_half", "tokens with rho < 1/2 / tokens", "[0, 1]", "per cents: the sampler writes what the trainer finds unlikely"),
    Metric("mismatch/sequence_log", f"quantiles over responses of mean le = log(PPL_behaviour / PPL_old); {_QUANTILES}", "any", "wider than the clip band: the sampler's log-probs cannot be the anchor", "histogram"),
    Metric("weight/mean", "mean over tokens of the correction weight", ">= 0", "far from 1: the correction rescales the learning rate"),
    Metric("weight/effective_size", "(sum b)^2 / (T sum b^2) over tokens", "(0, 1]", "below one half: the correction costs half the batch"),
    Metric("router/shift_mean", "mean over tokens of gamma; absent with training.anchor = sampler, unless the algorithm weighs with it", "(0, 1]", "falling: experts move under the update"),
    Metric("router/floored", "tokens with gamma below the paper's floor of 0.8 / tokens", "[0, 1]", "per cents: routing moves under the update"),
    Metric("router/shift", f"quantiles over tokens of gamma; {_QUANTILES}", "(0, 1]", "a low tail at the floor: routing has changed for those tokens", "histogram"),
    Metric("router/entropy", "mean over tokens and layers of the entropy of the router's probabilities over all experts", ">= 0", "falling to 0: every token has its fixed experts; log E: the router decides nothing"),
    Metric("router/load", "over the choices of an update; suffixes _max: E times the largest share of an expert, mean over layers; _unused: experts never chosen / experts", "_max >= 1, _unused [0, 1]", "_max near E / K: a few experts do all the work; _unused rising: experts die"),
    Metric("router/flip_mean", "mean over tokens and layers of 1 - |experts under old and new| / K, at the position that predicts the token (live choices, also under replay; old are the engine's where the anchor is)", "[0, 1]", "per cents within a step: the model that is updated is not the one that was sampled"),
    Metric("router/flip", f"the same per layer; {_LAYERS}", "[0, 1]", "rising with depth: small changes below become other experts above"),
    Metric("router/any_flip", "token-layers where at least one expert changed / token-layers", "[0, 1]", "as router/flip_mean"),
    Metric("router/jaccard", "mean over tokens and layers of 1 - |both| / |either|", "[0, 1]", "as router/flip_mean"),
    Metric("router/flip_token_correlation", "correlation over tokens of the flip rate (mean over layers) with |lw|", "[-1, 1]", "near 1: where experts flip, token ratios jump"),
    Metric("router/flip_sequence_correlation", "correlation over responses of the flip rate (mean over tokens and layers) with |log s|", "[-1, 1]", "near 1: flips move whole responses too, and a sequence ratio does not average them out"),
    Metric("router/mismatch_flip_mean", "mean over tokens and layers of 1 - |experts of engine and trainer| / K, with the weights the engine had", "[0, 1]", "per cents: engine and trainer are two models; R3 replays the engine's routes"),
    Metric("router/mismatch_flip", f"the same per layer; {_LAYERS}", "[0, 1]", "as above"),
    Metric("router/mismatch_any_flip", "token-layers where engine and trainer differ in at least one expert / token-layers", "[0, 1]", "as above"),
    Metric("router/mismatch_jaccard", "mean over tokens and layers of 1 - |both| / |either| of engine and trainer", "[0, 1]", "as above"),
    Metric("advantage/zero", "responses with advantage 0 everywhere / responses", "[0, 1]", "near 1: groups have no variance, the data is too easy or too hard"),
    Metric("advantage/absolute", "mean over responses of |A| (its token mean)", ">= 0", "0: nothing to learn"),
    Metric("length/mean", "tokens / responses", ">= 0", "a fall to a few tokens or a climb to the limit"),
    Metric("length/max", "longest response", ">= 0", "at the limit: responses are cut", "max"),
    Metric("length/tokens", f"quantiles over responses of L; {_QUANTILES}", ">= 0", "as length/mean", "histogram"),
    Metric("length/empty", "rollouts without a token / rollouts", "[0, 1]", "above 0: prompts end at once, or everything is masked"),
)  # fmt: skip


def definition(key: str) -> Metric:
    """The metric a reported key belongs to (suffixes of quantiles and bins, and penalty names, are resolved)."""
    exact = {metric.key: metric for metric in METRICS}
    if key in exact:
        return exact[key]
    stem = key.rsplit("_", 1)[0]
    if stem in exact:
        return exact[stem]
    if key.startswith("loss/"):
        return exact["loss/NAME"]
    raise KeyError(f"no metric is called {key!r}")


def document() -> str:
    """`docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Generated by `make docs` from `src/legato/diagnostics/metrics/definitions.py`; do not edit.",
        "",
        "A metric is never averaged twice: each call contributes a total with its own count, a maximum or a histogram,",
        "and these combine exactly over micro-batches and ranks (`outcome.sums`) before they become numbers",
        "(`outcome.metrics`). Quantiles come from histograms with fixed signed-log edges, eight per octave.",
        "",
        "Notation: lw = new - old per token; s = exp(mean of lw over the response); A the advantage; le = old - behaviour;",
        "rho = exp(le). *Clipped*: the trust region bounded or dropped the term (zero gradient; under weight-clip held at the bound).",
        "*Outside*: out of the band whatever the sign of A. A metric is NaN where nothing was counted, so that keys stay the same.",
        "",
        *table(METRICS),
    ]
    return "\n".join(lines) + "\n"


def table(metrics: Iterable[Metric]) -> list[str]:
    """Metrics as the lines of a table."""
    lines = ["| key | formula | range | combines | a bad value |", "|---|---|---|---|---|"]
    for metric in metrics:
        cells = (f"`{metric.key}`", metric.formula, metric.range, metric.combines, metric.bad)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
