"""`legato lab equivalence`: s = PPL_old / PPL_new = exp(delta H) on responses of your model, what breaks it, and how
perplexity and cross-entropy change over a training run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.batch import collate
from legato.core.rollout import Group
from legato.diagnostics.equivalence import Likelihoods, implied_entropy, likelihoods, quotient_of_means, relative_error
from legato.lab.recorder import ObservedUpdate, Say, UpdateRecorder, channels_of, facts, make_recorder
from legato.pages.curves import round_six
from legato.pages.experiment import Account, Check, Sheet
from legato.pages.traces import AMBER, BLUE, GREEN, GREY, RED, VIOLET, Figure, Trace, figure, line
from legato.policy.policy import Policy
from legato.run.mismatch import restoring_weights
from legato.run.target import Target

STEPS = 285
"""The published protocol: three epochs, 1,140 gradient steps; here 4 updates a step."""
OTHER_TEMPERATURE = 1.1
PUBLISHED = {"perplexity": -0.752, "entropy": -0.816}
"""Relative changes over training that arXiv 2510.23142 reports."""
_OWN = "what the policy writes, by step"
"""Other responses at the end than at the start, so that there is no ratio between the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same responses under two policies, float64."""

    old: Tensor
    new: Tensor
    mask: Tensor
    full_old: Tensor
    """Entropies of the whole distribution at each token."""
    full_new: Tensor
    new_hotter: Tensor
    """The new log-probs at another temperature."""


def equivalence(target: Target, *, steps: int, say: Say) -> Account:
    """Train `steps` steps, record every update, and compare responses under the first and the last policy."""
    recorder = make_recorder(target, say, steps=steps)
    prompts = max(8, recorder.resolved.config.training.prompts_per_step)
    first = recorder.groups(prompts)
    tokens = collate(first).texts.mask
    at_start = channels_of(recorder.policy, first)
    course: list[dict[str, float]] = []
    before = likelihoods(at_start[0], at_start[0], tokens)
    with restoring_weights(recorder.policy):
        pair: Pair | None = None
        for number in range(1, steps + 1):
            report = recorder.step()
            if number % 50 == 0 or number == steps:
                say(f"step {number} of {steps}")
            if pair is None:  # after one step: the shift that a clip sees
                pair = _score_pair(recorder.policy, first, tokens, at_start)
            course.append(
                _measure_step(number, recorder.observed, report.metrics)
                | _score_first_responses(recorder.policy, first, tokens, at_start, number, steps)
            )
        last = recorder.groups(prompts)
        at_end = channels_of(recorder.policy, last)
    assert pair is not None
    ends = _start_and_end(
        course, before, likelihoods(at_end[0], channels_of(recorder.policy, last)[0], collate(last).texts.mask)
    )
    return _account(recorder, pair, course, ends)


def _score_pair(policy: Policy, groups: Sequence[Group], tokens: Tensor, at_start: tuple[Tensor, Tensor]) -> Pair:
    new, full = channels_of(policy, groups)
    heated = collate(groups).texts.temperature[0].item() * OTHER_TEMPERATURE
    hotter = channels_of(policy, groups, heated)[0]
    return Pair(old=at_start[0], new=new, mask=tokens, full_old=at_start[1], full_new=full, new_hotter=hotter)


def _measure_step(number: int, observed: Sequence[ObservedUpdate], metrics: Mapping[str, float]) -> dict[str, float]:
    """Measure the identity in the updates of a step, in training precision and float64, and the policy's entropy."""
    updates = [each for each in observed if each.step == number]
    exact = [likelihoods(each.new, each.old, each.mask) for each in updates]
    live = [likelihoods(each.new.to(each.precision), each.old.to(each.precision), each.mask) for each in updates]
    entropy = torch.cat([each.entropy_old for each in exact]) if exact else torch.zeros(0)
    return {
        "step": number,
        "updates": len(updates),
        "responses": sum(len(each.log_s) for each in exact),
        "error_live": max((float(each.error.max()) for each in live), default=0.0),
        "error_float64": max((float(each.error.max()) for each in exact), default=0.0),
        "entropy": float(entropy.mean()) if len(entropy) else float("nan"),
        "perplexity": float(entropy.exp().mean()) if len(entropy) else float("nan"),
        "reward": metrics.get("reward/mean", float("nan")),
    }


def _score_first_responses(
    policy: Policy, groups: Sequence[Group], tokens: Tensor, at_start: tuple[Tensor, Tensor], number: int, steps: int
) -> dict[str, float]:
    """Score the first responses under the current policy, about twenty times over the run: each costs a forward pass."""
    if number % max(1, steps // 20) and number not in (1, steps):
        return {}
    values = likelihoods(channels_of(policy, groups)[0], at_start[0], tokens)
    return {
        "first_entropy": float(values.entropy_new.mean()),
        "first_perplexity": float(values.entropy_new.exp().mean()),
        "first_s": float(values.log_s.mean().exp()),
    }


def _start_and_end(
    course: Sequence[Mapping[str, float]], before: Likelihoods, last: Likelihoods
) -> dict[str, dict[str, float]]:
    """Return entropy and perplexity at start and end, for each set of responses they can be measured on."""
    own = [point for point in course if point["responses"]]
    count = max(1, min(10, len(own) // 4))
    own_old, own_new = own[:count], own[-count:]

    def mean(points: Sequence[Mapping[str, float]], key: str) -> float:
        return sum(point[key] for point in points) / len(points)

    scored = [point for point in course if "first_entropy" in point]
    return {
        _OWN: {
            "entropy_start": mean(own_old, "entropy"),
            "entropy_end": mean(own_new, "entropy"),
            "perplexity_start": mean(own_old, "perplexity"),
            "perplexity_end": mean(own_new, "perplexity"),
        },
        "what the first policy wrote": {
            "entropy_start": float(before.entropy_old.mean()),
            "entropy_end": scored[-1]["first_entropy"],
            "perplexity_start": float(before.entropy_old.exp().mean()),
            "perplexity_end": scored[-1]["first_perplexity"],
        },
        # The old policy of `last` is that of the start, the new one that of the end.
        "what the last policy writes": {
            "entropy_start": float(last.entropy_old.mean()),
            "entropy_end": float(last.entropy_new.mean()),
            "perplexity_start": float(last.entropy_old.exp().mean()),
            "perplexity_end": float(last.entropy_new.exp().mean()),
        },
    }


def identity_errors(pair: Pair) -> dict[str, float]:
    """Return the largest relative error of PPL_old / PPL_new against s, for each way to compute it."""
    exact = likelihoods(pair.new, pair.old, pair.mask)
    s = exact.s

    def quotient(new: Tensor, old: Tensor, mask: Tensor = pair.mask) -> Tensor:
        return likelihoods(new, old, mask).perplexity_quotient

    single = likelihoods(pair.new.float(), pair.old.float(), pair.mask)
    stored = [x.bfloat16().double() for x in (pair.new, pair.old)]
    lengths = pair.mask.sum(1, keepdim=True)
    without_end = pair.mask & (torch.arange(pair.mask.shape[1]) < (lengths - 1).clamp(min=1))
    full = [likelihoods(h, h, pair.mask).entropy_new for h in (pair.full_old, pair.full_new)]
    padded = exact.log_s * exact.lengths / pair.mask.shape[1]
    halved = [-(torch.where(pair.mask, x, 0.0).bfloat16().sum(1) / lengths[:, 0].bfloat16()) for x in (pair.new, pair.old)]
    return {
        "float64": relative_error(exact.perplexity_quotient, s),
        "float32": float(single.error.double().max()),
        "log-probs stored in bfloat16": relative_error(quotient(*stored), s),
        "all in bfloat16": relative_error(halved[1].exp() / halved[0].exp(), s),
        "mask of PPL without the last token": relative_error(quotient(pair.new, pair.old, without_end), s),
        "divided by the padded width": relative_error(padded.exp(), s),
        f"new at temperature x {OTHER_TEMPERATURE:g}": relative_error(quotient(pair.new_hotter, pair.old), s),
        "entropy of the whole distribution": relative_error((full[1] - full[0]).neg().exp(), s),
        "exp(H_new - H_old)": relative_error((exact.entropy_new - exact.entropy_old).exp(), s),
    }


def _account(
    recorder: UpdateRecorder, pair: Pair, course: Sequence[Mapping[str, float]], ends: Mapping[str, Mapping[str, float]]
) -> Account:
    exact = likelihoods(pair.new, pair.old, pair.mask)
    broken = identity_errors(pair)
    mean_s, of_means = quotient_of_means(exact)
    responses = int(sum(point["responses"] for point in course))
    updates = int(sum(point["updates"] for point in course))
    live = max(point["error_live"] for point in course)
    inverse = float(((exact.entropy_new - exact.entropy_old).exp() * exact.s - 1).abs().max())
    checks = [
        Check(what="largest error of a response, float64", expected=0.0, measured=broken["float64"], tolerance=1e-12),
        Check(what="the same, float32", expected=0.0, measured=broken["float32"], tolerance=1e-6),
        Check(what=f"the same in all {updates} updates, as trained", expected=0.0, measured=live, tolerance=1e-6),
        Check(what="exp(H_new - H_old) times s, minus 1", expected=0.0, measured=inverse, tolerance=1e-12),
        *_change_checks(ends["what the last policy writes"]),
    ]
    sentences = [
        f"The identity held for all {responses:,} responses of {updates:,} updates: the largest relative error was"
        f" {live:.1e} in {str(recorder.policy.dtype).removeprefix('torch.')} and"
        f" {max(point['error_float64'] for point in course):.1e} in float64.",
        f"It is one of each response, not of a batch: the mean of s was {mean_s:.6f}, the quotient of mean perplexities"
        f" {of_means:.6f}.",
        *(f"{name}: off by up to {error:.1e}." for name, error in list(broken.items())[2:]),
    ]
    return Account(
        name="equivalence",
        title="The sequence ratio is a quotient of perplexities",
        about="s = PPL_old / PPL_new = exp(H_old - H_new) for each response, by arithmetic: what deviates is a fault of"
        " precision, mask, denominator or temperature. The published protocol, three epochs and 1,140 updates, shows how"
        " perplexity and cross-entropy go while a policy is trained.",
        facts=facts(recorder) | {"steps": str(len(course)), "updates": f"{updates:,}"},
        sentences=sentences,
        checks=checks,
        sheets=_sheets(exact, broken, ends, course),
        figures=_figures(exact, broken, course),
        data={"course": list(course), "ends": ends, "mean_s": mean_s, "quotient_of_means": of_means},
    )


def _change_checks(ends: Mapping[str, float]) -> list[Check]:
    """Show the changes beside the published totals, without judging them: the model is another."""
    return [
        Check(
            what=f"change of {word} from the first to the last policy, on what the last writes",
            expected=published,
            measured=ends[f"{word}_end"] / ends[f"{word}_start"] - 1,
            source="arXiv 2510.23142, another model and task",
        )
        for word, published in PUBLISHED.items()
    ]


def _sheets(
    exact: Likelihoods,
    broken: Mapping[str, float],
    ends: Mapping[str, Mapping[str, float]],
    course: Sequence[Mapping[str, float]],
) -> list[Sheet]:
    implied = implied_entropy(PUBLISHED["perplexity"], PUBLISHED["entropy"])
    rows: list[tuple[Any, ...]] = []
    for name, each in ends.items():
        h = (each["entropy_start"], each["entropy_end"])
        ppl = (each["perplexity_start"], each["perplexity_end"])
        s = None if name == _OWN else float(torch.tensor(h[0] - h[1]).exp())
        rows.append((name, *ppl, ppl[1] / ppl[0] - 1, *h, h[1] / h[0] - 1, s))
    published = torch.tensor(implied, dtype=torch.float64)
    start, end = float(published.exp()), float((published * (1 + PUBLISHED["entropy"])).exp())
    rows.append(
        ("published, if both are of one average", start, end, PUBLISHED["perplexity"], implied,
         implied * (1 + PUBLISHED["entropy"]), PUBLISHED["entropy"], start / end)
    )  # fmt: skip
    sample = [
        (int(n), float(ls.exp()), float(o.exp()), float(w.exp()), float((o - w).exp()), float(e))
        for n, ls, o, w, e in zip(exact.lengths, exact.log_s, exact.entropy_old, exact.entropy_new, exact.error, strict=True)
    ]
    return [
        Sheet(
            name="breaks",
            title="What breaks it",
            note="The largest relative error of PPL_old / PPL_new beside the exact s, over responses whose policy moved by"
            " one step.",
            headings=("computed", "largest error"),
            rows=tuple(broken.items()),
            digits=2,
        ),
        Sheet(
            name="ends",
            title="Perplexity and cross-entropy over the run",
            note="Means over responses. s: exp of the mean H at the start minus that at the end, where they are of the same"
            " responses.",
            headings=("of", "PPL start", "PPL end", "PPL change", "H start", "H end", "H change", "s"),
            rows=tuple(rows),
            shares=("PPL change", "H change"),
            digits=5,
        ),
        Sheet(
            name="responses",
            title="Some responses after one step",
            note="Each on its own line, float64.",
            headings=("tokens", "s", "PPL old", "PPL new", "exp(H_old - H_new)", "error"),
            rows=tuple(sample[:12]),
            digits=9,
        ),
        Sheet(
            name="course",
            title="Every tenth of the run",
            note="Of the responses of the step before the update; error: the largest of a response, as trained.",
            headings=("step", "responses", "PPL", "H", "error", "reward"),
            rows=tuple(
                (int(p["step"]), int(p["responses"]), p["perplexity"], p["entropy"], p["error_live"], p["reward"])
                for p in course[:: max(1, len(course) // 10)]
            ),
            digits=4,
        ),
    ]


def _figures(exact: Likelihoods, broken: Mapping[str, float], course: Sequence[Mapping[str, float]]) -> list[Figure]:
    s, quotient = exact.s.tolist(), exact.perplexity_quotient.tolist()
    ends = [min(s), max(s)]
    scatter: Trace = {"type": "scatter", "mode": "markers", "name": "responses", "x": s, "y": quotient}
    scatter["marker"] = {"color": BLUE, "size": 7, "opacity": 0.7}
    steps = [point["step"] for point in course]
    scored = [point for point in course if "first_perplexity" in point]
    # Errors of exactly 0 have no place on a logarithmic axis.
    shown = {name: max(error, 1e-17) for name, error in broken.items()}
    colours = [GREEN if error < 1e-6 else RED for error in shown.values()]
    figures = [
        figure(
            "s and the quotient of perplexities",
            "A point a response, after one step of training; the line is equality.",
            [scatter, line(ends, ends, "equal", GREY, dash="dash")],
            {"xaxis": {"title": {"text": "s"}}, "yaxis": {"title": {"text": "PPL_old / PPL_new"}}, "hovermode": "closest"},
        ),
        figure(
            "What breaks the identity",
            "Largest relative error of a response. Green: below 1e-6.",
            [{"type": "scatter", "mode": "markers", "name": "error", "x": list(shown), "y": list(shown.values()),
              "marker": {"color": colours, "size": 12}}],
            {"xaxis": {"title": {"text": ""}, "type": "category"},
             "yaxis": {"title": {"text": "relative error"}, "type": "log", "exponentformat": "power"}},
            wide=True,
        ),
        figure(
            "Perplexity over the run",
            "Of what the policy writes at each step, and of what the first policy wrote under the policy of now.",
            [line(steps, [round_six(point["perplexity"]) for point in course], "its own responses", BLUE),
             line([p["step"] for p in scored], [round_six(p["first_perplexity"]) for p in scored], "the first responses",
                  AMBER)],
            {"yaxis": {"title": {"text": "perplexity"}, "type": "log"}},
        ),
        figure(
            "Cross-entropy over the run",
            "H = log PPL of a response, mean over responses.",
            [line(steps, [round_six(point["entropy"]) for point in course], "its own responses", VIOLET),
             line([p["step"] for p in scored], [round_six(p["first_entropy"]) for p in scored], "the first responses",
                  AMBER)],
            {"yaxis": {"title": {"text": "nats a token"}, "rangemode": "tozero"}},
        ),
    ]  # fmt: skip
    return [each for each in figures if each is not None]
