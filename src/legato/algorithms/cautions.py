"""Warnings about an algorithm: rules that read its parts, whatever its name.

They apply to named algorithms and to overridden ones. A run prints them at the start.
"""

from collections.abc import Callable, Iterator

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import entry, is_published
from legato.core.parts import Part

WIDE = 0.05
"""A half-width on a sequence ratio beyond which nothing is ever clipped in practice: sd(log s) is a few 1e-4 to 1e-2."""


def cautions(algorithm: Algorithm) -> list[str]:
    """All warnings about an algorithm: those of the rules, then those of its catalogue entry."""
    warnings = [sentence for rule in _RULES for sentence in rule(algorithm)]
    if not is_published(algorithm.name):
        return warnings
    published = entry(algorithm.name)
    if not published.verified:
        warnings.insert(0, "Not verified: some constants or forms could not be checked against the paper.")
    return [*warnings, *published.cautions]


def _part(parts: tuple[Part, ...], name: str) -> Part | None:
    return next((part for part in parts if part.name == name), None)


def _is_mean_over_response(algorithm: Algorithm) -> bool:
    ratio = algorithm.objective.ratio
    return ratio.name.startswith("geometric") and ratio.level == "sequence"


def _length_weighting(algorithm: Algorithm) -> Iterator[str]:
    if _is_mean_over_response(algorithm) and algorithm.aggregate.name in ("token-mean", "group-token-mean"):
        yield (
            f"A sequence ratio under {algorithm.aggregate.name} weighs each response by its length; the papers take the"
            " mean over responses (aggregate = 'sequence-mean')."
        )


def _fixed_bounds(algorithm: Algorithm) -> Iterator[tuple[str, float]]:
    """The distances of fixed bounds on the ratio with the fields that hold them, "clip.low"."""
    fixed = {part.name for part in algorithm.objective.trust if not part.adapts}
    for name, bounds in algorithm.objective.bounds().items():
        if name in fixed and bounds.of == "ratio":
            fields = bounds.fields if len(bounds.fields) == 2 else ("low", "high")
            sides = zip(fields, (bounds.low, bounds.high), strict=True)
            yield from ((f"{name}.{field}", distance) for field, distance in sides if distance is not None)


def _never_clips(algorithm: Algorithm) -> Iterator[str]:
    for field, width in _fixed_bounds(algorithm) if _is_mean_over_response(algorithm) else ():
        if width >= WIDE:
            yield (
                f"{field} = {width:g} on a sequence ratio never clips: log s is a mean over the response and"
                " moves by 1e-4 to 1e-2. The GSPO paper uses 3e-4 / 4e-4."
            )


def _tight_token_clip(algorithm: Algorithm) -> Iterator[str]:
    ratio = algorithm.objective.ratio
    if ratio.level == "token" and ratio.name.startswith("geometric"):
        narrow = min((width for _, width in _fixed_bounds(algorithm)), default=1.0)
        if narrow < 0.01:
            yield f"A band of {narrow:g} on token ratios clips nearly every token that moved; 0.2 is usual there."


def _many_tokens(algorithm: Algorithm) -> Iterator[str]:
    auto = _part(algorithm.objective.trust, "auto-clip")
    target = getattr(auto, "target", 0.0)
    if algorithm.objective.ratio.level == "token" and target >= 0.01:
        yield (
            f"auto-clip.target = {target:g} on token ratios clips {target:.0%} of the tokens; a fixed clip of 0.2 clips a"
            " few per mille. Set a smaller target, and a wider ceiling."
        )


def _kl_gradients(algorithm: Algorithm) -> Iterator[str]:
    kl = _part(algorithm.objective.penalties, "kl")
    estimator = getattr(kl, "estimator", None)
    if estimator == "k1":
        yield "The gradient of k1 as a loss is zero in expectation: noise and no penalty. Use k2 or a corrected form."
    if estimator == "k3":
        yield (
            "The gradient of k3 as a loss is that of KL(ref || pi); for KL(pi || ref) use kl-straight-through or"
            " kl-ratio-weighted."
        )
    if _part(algorithm.objective.penalties, "kl-ratio-weighted") is not None and algorithm.objective.ratio.level != "token":
        yield "The ratio-weighted KL uses token ratios although the policy term does not: its estimator needs them."


def _corrections(algorithm: Algorithm) -> Iterator[str]:
    for part in algorithm.objective.corrections:
        level = getattr(part, "level", None)
        if level == "product":
            yield (
                f"correction '{part.name}' at product level has the length trap: a gap of 0.001 per token is a weight of 7.4"
                " at 2,000 tokens."
            )
        if level == "token" and algorithm.objective.ratio.level == "sequence":
            yield f"correction '{part.name}' weighs tokens one by one beside a ratio of the whole response; 'match' fits it."


def _sampler_anchor(algorithm: Algorithm) -> Iterator[str]:
    if getattr(algorithm.objective.ratio, "anchor", "old") == "sampler" and _is_mean_over_response(algorithm):
        yield (
            "Anchored on the sampler: the noise between engine and trainer is inside the ratio. Measure it against the band"
            " first; in bf16 it is often wider than 3e-4."
        )


def _gradient_grows(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.aggregate.name == "sequence-sum" and algorithm.objective.ratio.level != "sequence":
        yield "Token sums: the gradient norm grows with the length of responses."


def _missing_constants(algorithm: Algorithm) -> Iterator[str]:
    if getattr(algorithm.aggregate, "constant", 0.0) is None:
        yield "aggregate.constant must be given: the response budget in tokens (a run fills in its limit)."
    log_clip = _part(algorithm.objective.trust, "log-clip")
    if log_clip is not None and (getattr(log_clip, "log_low") is None or getattr(log_clip, "log_high") is None):  # noqa: B009
        yield "objective.trust.log-clip.log_low and log_high must be given."


def _filters(algorithm: Algorithm) -> Iterator[str]:
    for part in algorithm.filters:
        yield (
            f"The filter '{part.name}' is for whoever samples: legato.loss applies none. Refill such groups, or pass keep=."
        )


_RULES: tuple[Callable[[Algorithm], Iterator[str]], ...] = (
    _missing_constants,
    _filters,
    _length_weighting,
    _never_clips,
    _tight_token_clip,
    _many_tokens,
    _kl_gradients,
    _corrections,
    _sampler_anchor,
    _gradient_grows,
)
