"""An objective is a value: a ratio, and tuples of trust regions, corrections and penalties."""

from dataclasses import dataclass, replace

from legato.core.own_parts import check_returned, check_returned_type
from legato.core.parts import Part
from legato.core.scope import Scope
from legato.errors import InputError
from legato.objectives.corrections import combine
from legato.objectives.slots import Adjustment, Aggregate, Bounds, Context, Correction, Penalty, Ratio, State, Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The function to maximise, before aggregation. Combinations of parts that make no sense are refused."""

    ratio: Ratio
    trust: tuple[Trust, ...] = ()
    corrections: tuple[Correction, ...] = ()
    penalties: tuple[Penalty, ...] = ()

    def __post_init__(self) -> None:
        for slot in ("trust", "corrections", "penalties"):
            names = [part.name for part in getattr(self, slot)]
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise InputError(f"objective.{slot} holds {', '.join(sorted(twice))!r} twice; a part may appear once")
        self._refuse_double_counting()
        self._refuse_edges_with_gates()
        self._refuse_parts_without_effect()
        self._refuse_two_bands()

    def _refuse_double_counting(self) -> None:
        weighing = [part.name for part in self.corrections if part.weighs]
        if getattr(self.ratio, "anchor", "old") == "sampler" and weighing:
            raise InputError(
                f"objective.ratio.anchor = 'sampler' already divides by the sampler; the correction {weighing[0]!r} would"
                " count that ratio twice. Use anchor 'old' with the correction, or the sampler anchor without it"
            )

    def _refuse_edges_with_gates(self) -> None:
        gates = [part.name for part in self.trust if part.role == "gate"]
        clips = [part.name for part in self.trust if part.role == "clip"]
        if len(gates) > 1 or (gates and clips):
            raise InputError(
                f"objective.trust holds {[p.name for p in self.trust]}: a soft gate replaces the clip and stands alone"
                " (masks and rejections may join it)"
            )

    def _refuse_parts_without_effect(self) -> None:
        """Refuse parts that read a ratio if there is none, and parts that bound a weight if the ratio is not one."""
        if self.ratio.name == "none":
            idle = [part.name for part in self.trust if part.reads_ratio]
            idle += [part.name for part in self.corrections if part.reads_ratio]
            if idle:
                raise InputError(f"objective.ratio is 'none': there is no ratio for {idle[0]!r} to act on")
        if self.ratio.gradient != "weight":
            lost = [part.name for part in self.trust if part.weight_form_only]
            if lost:
                raise InputError(
                    f"trust {lost[0]!r} bounds a detached weight; on ratio {self.ratio.name!r}, which is differentiated"
                    " through, bounded tokens would lose their gradient. Use ratio 'geometric-weight'"
                )

    def _refuse_two_bands(self) -> None:
        """Refuse a band that adapts beside a fixed one on the same ratio: only the narrower would have an effect."""
        adapting = [part.name for part in self.trust if part.adapts]
        fixed = [
            part.name
            for part in self.trust
            if not part.adapts and (part.searches or ((stated := part.bounds(None)) is not None and stated.of == "ratio"))
        ]
        if adapting and fixed:
            raise InputError(
                f"objective.trust holds {adapting[0]!r} and {fixed[0]!r}, two bands on one ratio: set the bounds of the"
                f" first, objective.trust.{adapting[0]}.low and .high, or take one out, as in"
                f" objective.trust.{fixed[0]} = null (None in Python, false in TOML)"
            )

    def parts(self) -> tuple[Ratio | Trust | Correction | Penalty, ...]:
        return (self.ratio, *self.trust, *self.corrections, *self.penalties)

    def needs(self) -> dict[str, tuple[str, ...]]:
        """Which optional signals each part reads, by a description of the part."""
        return {f"{part.kind} '{part.name}'": part.needs() for part in self.parts()}

    def needs_groups(self, aggregate: Aggregate) -> list[str]:
        """Descriptions of the parts that need group ids."""
        readers: tuple[Part, ...] = (self.ratio, aggregate)
        return [f"{part.kind} '{part.name}'" for part in readers if getattr(part, "needs_groups", False)]

    def scope(self, aggregate: Aggregate) -> Scope:
        """How much of an update one call must contain."""
        if self.keep_reads_logprobs(aggregate):
            return Scope.UPDATE
        return max(part.scope for part in (*self.parts(), aggregate))

    def keep_reads_logprobs(self, aggregate: Aggregate) -> bool:
        """Whether the denominator depends on responses that are rejected by their new log-probs."""
        return aggregate.denominator == "kept" and any(part.rejects for part in self.trust)

    @property
    def folds_weights(self) -> bool:
        """Whether correction weights enter the ratio instead of multiplying the term."""
        return any(part.folds_weights for part in self.trust)

    def adjustment(self, context: Context) -> Adjustment:
        """One adjustment for all corrections. If their weights enter a product ratio, level 'match' means each token."""
        if self.folds_weights:
            context = replace(context, segments=context.signals.segments("token"))
        adjustments = [part.apply(context) for part in self.corrections]
        for part, adjustment in zip(self.corrections, adjustments, strict=True):
            if part.of_user:
                _check_adjustment(part, adjustment, context)
        return combine(adjustments)

    def bounds(self, state: State | None = None) -> dict[str, Bounds]:
        """The current bands of the trust regions, by part. Parts without bounds are left out."""
        now = {} if state is None else state
        stated = {part.name: part.bounds(now.get(part.name)) for part in self.trust if part.reads_ratio}
        return {name: band for name, band in stated.items() if band is not None and not band.is_open}

    def initial(self) -> State:
        """The first state of the adaptive parts."""
        states = {part.name: part.initial() for part in self.parts()}
        return {name: state for name, state in states.items() if state is not None}


def _check_adjustment(part: Correction, adjustment: Adjustment, context: Context) -> None:
    """Check what a correction returned."""
    check_returned_type(part, "apply", adjustment, Adjustment)
    for name in ("log_shift", "weight", "keep"):
        rows, width = context.signals.logprobs.shape
        check_returned(part, f"{name} of apply", getattr(adjustment, name), rows, width, 1)
