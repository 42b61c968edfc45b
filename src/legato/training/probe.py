"""The numerical noise of the ratio: the same weights score the same responses twice, so every ratio should be 1.

GSPO's published band is 3e-4, and rounding alone may fill it. Three pairs of scores are compared on the run's own rollouts:
    same     one pack without a gradient and with one, as in an update. They must be equal to the bit, else s does not
             start at 1
    packs    packs of the run's size, and each response alone
    engine   the engine's log-probs and the trainer's
For each pair: |log s| of a response; the largest |r - 1| of the algorithm's own ratio (of a response, a turn or a token);
and the share of responses (or tokens, if the ratio or the clip is per token) outside the algorithm's band. The clip would
cut these off although nothing was trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.counts import Counts, Tally
from legato.core.device import to_device
from legato.core.mask import Mask
from legato.core.own_parts import call_parts, check_returned_type
from legato.core.scope import Scope
from legato.core.shapes import PerToken, Spread
from legato.core.signals import Signals
from legato.errors import InputError
from legato.objectives.slots import Bounds, Context, Region, State, TokenTrust, Trust
from legato.policy.experts.routing import Directions
from legato.policy.policy import Policy
from legato.training.plan import micro_batches
from legato.training.tables import Tables

ROWS = 64
WALKED = 256
"""Tokens of a response that are walked through operation by operation where engine and trainer differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far two scorings of the same responses by the same weights are apart."""

    max: float
    """Largest |log s| of a response, s over all its tokens."""
    rms: float
    """Root mean square of log s over the responses."""
    token_max: float
    """Largest |log-ratio| of a token."""
    ratio: float
    """Largest |r - 1| of the algorithm's own ratio."""
    bounded: float
    """Largest |log-ratio| of what the band bounds: the algorithm's ratio, or a token's if tokens are clipped."""
    clipped: float | None
    """Share of responses or tokens outside the band; None where there is no band."""
    compared: float = 0.0
    """Root mean square of the values that an adaptive clip bounds; 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The noise floor that the probe measured."""

    same: Gap
    packs: Gap
    engine: Gap
    same_tokens: float
    """Share of tokens whose log-prob differs in any bit between a pass with and one without a gradient."""
    unit: str
    """What is clipped: 'responses' or 'tokens'."""
    band: float | None
    """The narrower side of the algorithm's clip, as a distance of log s; None where it has none."""
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    """The bands of the trust regions at the time of the probe, by part."""
    engine_tokens: float = 0.0
    """Share of tokens whose log-prob differs in any bit between engine and trainer."""
    exact: bool = False
    """Whether engine and trainer must be equal to the bit (`rollouts.exact`)."""
    difference: str = ""
    """The first operation in which they differ although they must not."""
    lag: int = 0
    """How many versions older than the weights that score them the engine's responses may be (`rollouts.ahead`)."""
    reason: str = ""
    """Why old log-probs are recomputed; "" if they are not."""

    def metrics(self) -> dict[str, float]:
        metrics = {
            "noise/same_tokens": self.same_tokens,
            "noise/engine_tokens": self.engine_tokens,
            "noise/engine_token_max": self.engine.token_max,
        }
        for name, gap in self._gaps():
            metrics |= {f"noise/{name}_max": gap.max, f"noise/{name}_rms": gap.rms, f"noise/{name}_ratio": gap.ratio}
            if gap.clipped is not None:
                metrics[f"noise/{name}_clipped"] = gap.clipped
        return metrics

    def _gaps(self) -> Iterator[tuple[str, Gap]]:
        yield from (("same", self.same), ("packs", self.packs), ("engine", self.engine))

    def noise(self, anchored_on_sampler: bool) -> float:
        """The noise floor of a clip that adapts.

        It includes the gap between different packs: the same path is equal to the bit only until weights move, and then
        rounding differs as much as it does between packs.
        """
        gaps = [self.same, self.packs, *([self.engine] if anchored_on_sampler else [])]
        return max(gap.compared for gap in gaps)

    @property
    def sampler_is_safe(self) -> bool:
        """Whether the engine's log-probs may be the anchor."""
        return self.equal or (self.band is not None and is_within(self.engine, self.band))

    @property
    def equal(self) -> bool:
        """Whether engine and trainer must be equal to the bit and are."""
        return self.exact and not self.engine_tokens

    @property
    def fills_the_band(self) -> bool:
        """Whether there is a band and the engine's noise takes more than a third of it."""
        return self.band is not None and not is_within(self.engine, self.band)

    def refusal(self) -> str:
        """The error message: why the engine's log-probs cannot be the anchor, and what to do."""
        assert self.band is not None
        clipped = f", {100 * self.engine.clipped:.3g} % of {self.unit} outside the band" if self.engine.clipped else ""
        return (
            "training.anchor = 'sampler' is not safe here: with nothing trained, engine and trainer differ by up to"
            f" {self.engine.bounded:.1e} in the log-ratio that is clipped{clipped}; allowed is {self.band / 3:.1e}, a third"
            f" of the clip band of {self.band:.1e}. Recompute the anchor (training.anchor=auto), widen the clip, or go on"
            " all the same with training.accept_unsafe_anchor=true"
        )

    def lines(self, anchor: str) -> list[str]:
        """Lines for the records and the report: the measured noise, what follows for clip and anchor, and warnings."""
        chosen = "the engine's log-probs are the anchor" if anchor == "sampler" else self._recomputed()
        same, other, engine = (_format_gap(gap.ratio) for _, gap in self._gaps())
        lines = [
            f"numerics of the ratio with nothing trained, max |s - 1|: {same} on the same path, {other} in other packs,"
            f" {engine} engine against trainer{self._age()}"
        ]
        if self.band is None:
            lines.append(f"there is no clip band; {chosen}")
        else:
            shares = [f"{100 * gap.clipped:.3g} %" for _, gap in self._gaps() if gap.clipped is not None]
            lines.append(f"outside the clip band of {self.band:.1e}: {', '.join(shares)} of {self.unit}; {chosen}")
        if self.equal:
            lines.append("engine and trainer equal: every log-prob of the engine has the trainer's bits")
        return [*lines, *self._warnings(anchor)]

    def verdict(self, anchor: str) -> list[str]:
        """Lines to print: whether the numerics are fine, and warnings. The report has the numbers (`lines`)."""
        warnings = [each for each in self._warnings(anchor) if each.startswith("warning: ")]
        if warnings:
            return ["numerics are not fine (all numbers in the report):", *warnings]
        if self.equal and anchor == "sampler":
            return ["numerics are exact: engine and trainer equal to the bit, so the engine's log-probs are the old ones"]
        if anchor == "recompute":
            return [
                f"numerics are fine: with nothing trained the ratio is exactly 1; {self._recomputed()}"
                " (numbers in the report)"
            ]
        where = "close to 1, and nothing is clipped" if self.band is None else "well inside the clip band"
        return [f"numerics are fine: with nothing trained the ratio is {where} (numbers in the report)"]

    def _recomputed(self) -> str:
        return "old log-probs are recomputed" + (f": {self.reason}" if self.reason else "")

    def _age(self) -> str:
        """A clause for gaps between engine and trainer that hold more than rounding."""
        if not self.lag:
            return ""
        return f" (responses may be {self.lag} version{'s' if self.lag > 1 else ''} old)"

    def _warnings(self, anchor: str) -> list[str]:
        lines = []
        if self.exact and self.engine_tokens:
            lines.append(
                f"warning: {100 * self.engine_tokens:.3g} % of tokens differ between engine and trainer, which are exact"
                f" (rollouts.exact): {self.difference or 'the walk through both found no operation that differs'}"
            )
        if self.band is not None and self.fills_the_band:
            differ = f"engine and trainer differ by up to {self.engine.bounded:.1e}{self._age()}"
            gap = f"{differ} where {self.band / 3:.1e} would be safe"
            warning = f"warning: {gap}: the clip will act on what nobody trained"
            lines.append(warning if anchor == "sampler" else f"{gap}: its log-probs cannot be the anchor")
        if self.same_tokens:
            lines.append(
                f"warning: {100 * self.same_tokens:.3g} % of tokens score differently with and without a gradient in one and"
                " the same pack: s will not be exactly 1 before the first update"
            )
        return lines


class UnsafeAnchorError(InputError):
    """The configured anchor is the sampler, but its measured noise is too large."""

    def __init__(self, floor: Floor) -> None:
        super().__init__(floor.refusal())
        self.floor = floor


def is_within(gap: Gap, band: float) -> bool:
    """Whether a gap takes at most a third of the band and nothing of it is clipped."""
    return gap.bounded <= band / 3 and not gap.clipped


def _format_gap(size: float) -> str:
    return f"{size:.1e}" if size else "0"


def band(algorithm: Algorithm, state: State | None = None) -> float | None:
    """The narrowest bound the trust region puts on the ratio; an adaptive bound is read from the state."""
    stated = algorithm.objective.bounds(state).values()
    distances = [distance for bounds in stated for distance in (bounds.low, bounds.high) if distance is not None]
    return min((distance for distance in distances if distance > 0), default=None)


def probe(policy: Policy, algorithm: Algorithm, tables: Tables, tokens_per_pack: int, state: State | None = None) -> Floor:
    """Measure the noise floor: score the first responses with and without a gradient, alone, and compare with the engine."""
    texts, device = tables.texts, tables.device
    state = algorithm.initial() if state is None else state
    groups = sorted(set(texts.group[:ROWS].tolist()))
    rows = torch.isin(texts.group, torch.tensor(groups)).nonzero().squeeze(1)[:ROWS]
    parts = [part[torch.isin(part, rows)] for part in micro_batches(texts, groups, tokens_per_pack, shared=policy.packing)]
    together = _score(policy, tables, parts)[rows]
    with_gradient = _score_with_gradient(policy, tables, parts)[rows]
    alone = _score(policy, tables, [row.reshape(1) for row in rows])[rows]
    mask = Mask(texts.mask[rows].to(device), together.dtype)
    turn = tables.turn[rows]

    def gap(left: Tensor, right: Tensor) -> Gap:
        return call_parts(measure_gap, algorithm, mask, turn, mask.difference(left, right.to(left.dtype)), state)

    unequal = (with_gradient != together)[mask.tokens]
    sampled = tables.sampler_logprobs[rows].to(together.dtype)
    of_engine = (together != sampled) & mask.tokens
    return Floor(
        same=gap(with_gradient, together),
        packs=gap(together, alone),
        engine=gap(together, sampled),
        same_tokens=float(unequal.double().mean()) if len(unequal) else 0.0,
        engine_tokens=float(of_engine.sum() / mask.tokens.sum()) if len(unequal) else 0.0,
        exact=policy.exact,
        difference=_walk(policy, tables, rows[of_engine.any(1).cpu()]) if policy.exact else "",
        unit="responses" if _clips_responses(algorithm) else "tokens",
        band=band(algorithm, state),
        bounds=algorithm.objective.bounds(state),
    )


def _walk(policy: Policy, tables: Tables, rows: Tensor) -> str:
    """The first operation that differs between decoding and training in the first of some rows; "" if there is none."""
    if not len(rows):
        return ""
    from legato.rollouts.gpu.walk import first_difference

    texts, row = tables.texts, int(rows[0])
    group, length = int(texts.group[row]), min(int(texts.lengths[row]), WALKED)
    prompt = texts.prompts[group, : int(texts.prompt_lengths[group])]
    try:
        difference = first_difference(
            policy, prompt.cpu(), texts.tokens[row, :length].cpu(), temperature=float(texts.temperature[row])
        )
    except (RuntimeError, AssertionError) as error:  # a diagnosis must not end the run: memory, for one
        return f"the walk through both failed ({type(error).__name__})"
    return "" if difference is None else str(difference)


def measure_gap(algorithm: Algorithm, mask: Mask, turn: Tensor, drift: PerToken, state: State | None = None) -> Gap:
    """The gap of two scorings from their differences of log-probs `drift`, 0 outside the mask."""
    nothing = torch.zeros_like(drift)
    signals = Signals(
        mask=mask,
        logprobs=drift,
        old_logprobs=nothing,
        sampler_logprobs=nothing,
        advantages=torch.zeros_like(mask.lengths),
        turn=turn,
    )
    tally = Tally(tokens=mask.lengths.sum().double(), sequences=(mask.lengths > 0).sum().double())
    ratio = algorithm.objective.ratio
    context = Context(
        signals=signals,
        segments=signals.segments(ratio.level),
        counts=Counts(all=tally),
        state=algorithm.initial() if state is None else state,
    )
    responses = context.sequences.mean(drift)
    # A ratio that compares a response with its siblings is not 1 here; its noise is that of the response.
    own = ratio.reduce(ratio.tokens(signals), context) if ratio.reads_anchor else responses
    bounded, shares, compared = own, [], 0.0
    stated = algorithm.objective.bounds(context.state)
    for part in algorithm.objective.trust:
        bounds = stated.get(part.name)
        if bounds is not None and bounds.of == "tokens":
            bounded = drift
            shares.append(_share_outside(drift, bounds.lower, bounds.upper, mask))
        elif bounds is not None:
            shares.append(_share_outside(own, *_applied_band(part, bounds, own, context), mask))
        if part.adapts:
            values = part.compared(own, context)
            values = values[mask.lengths > 0] if values.shape[1] == 1 else values[mask.tokens]
            compared = float(values.double().square().mean().sqrt()) if len(values) else 0.0
    return Gap(
        max=float(responses.abs().max()),
        rms=float(responses.square().mean().sqrt()),
        token_max=float(drift.abs().max()),
        ratio=float(torch.expm1(own.double()).abs().max()),
        bounded=float(bounded.abs().max()),
        clipped=max(shares, default=None),
        compared=compared,
    )


def _applied_band(part: Trust, stated: Bounds, own: Spread, context: Context) -> tuple[Tensor | float, Tensor | float]:
    """The bounds a trust part puts on the log-ratio of each response or token.

    These are the bounds it applies, which may depend on the length, or the stated ones if it cannot be applied to few rows.
    """
    applied = None
    if part.scope is Scope.ROW and not part.needs():
        region = part.apply(Region(log_ratio=own, log_value=own), context)
        if part.of_user:
            check_returned_type(part, "apply", region, Region)
        applied = region.band
    return (stated.lower, stated.upper) if applied is None else applied


def _share_outside(values: Spread, low: Tensor | float, high: Tensor | float, mask: Mask) -> float:
    """The share of responses, or of tokens, outside the bounds."""
    outside = (values < low) | (values > high)
    counted = outside[mask.lengths > 0] if values.shape[1] == 1 else outside[mask.tokens]
    return float(counted.double().mean()) if len(counted) else 0.0


def _clips_responses(algorithm: Algorithm) -> bool:
    objective = algorithm.objective
    return objective.ratio.level == "sequence" and not any(isinstance(part, TokenTrust) for part in objective.trust)


def _score(policy: Policy, tables: Tables, parts: Sequence[Tensor]) -> Tensor:
    """[B, T]: log-probs without a gradient."""
    table = _empty_table(policy, tables)
    for rows in parts:
        if len(rows):
            logprobs = policy.score(tables.texts, rows, _replay_directions(tables)).logprobs
            table[to_device(rows, tables.device), : logprobs.shape[1]] = logprobs
    return table


def _score_with_gradient(policy: Policy, tables: Tables, parts: Sequence[Tensor]) -> Tensor:
    """[B, T]: log-probs as an update computes them; no backward runs, so parameters get no gradient."""
    table = _empty_table(policy, tables)
    for rows in parts:
        if not len(rows):
            continue
        with policy.accumulate_gradient(tables.texts, rows, _replay_directions(tables)) as forward:
            for piece in forward.pieces():
                logprobs = piece.channels.logprobs
                table[to_device(piece.rows, tables.device), : logprobs.shape[1]] = logprobs
    return table


def _replay_directions(tables: Tables) -> Directions | None:
    """Directions that replay the engine's routes under R3; None otherwise."""
    return None if tables.replay is None else Directions(replay=tables.replay, record=False)


def _empty_table(policy: Policy, tables: Tables) -> Tensor:
    return torch.zeros(tables.texts.tokens.shape, dtype=policy.dtype, device=tables.device)
