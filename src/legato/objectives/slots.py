"""The slots of an objective: the arguments and the result of each kind of part.

A part reads `[B, T]` and `[B, 1]` tensors only: no model, logits, packing or process group. It never changes the mask;
to reject tokens it returns `keep`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from legato.core.counts import Counts, Tally
from legato.core.parts import Part
from legato.core.scope import Scope
from legato.core.segments import Level, Segments
from legato.core.shapes import PerSequence, PerToken, Spread
from legato.core.signals import Signals
from legato.core.sums import Sums

PartState = Mapping[str, float | Tensor]
"""The state of one adaptive part: floats, or scalars on the device, which a host would have to wait for."""

State = Mapping[str, PartState]
"""The state of all adaptive parts, by part name. The caller of the updates holds it and saves it in checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs that every part of one call may read."""

    signals: Signals
    segments: Segments
    """The segments of the ratio."""
    counts: Counts
    state: State

    @property
    def sequences(self) -> Segments:
        """Whole responses."""
        return self.signals.segments("sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The ratio on its way through the trust parts."""

    log_ratio: Spread
    """The log-ratio from the ratio slot."""
    log_value: Spread
    """After the clips so far; the surrogate uses exp of it unless a gate has set `value`."""
    value: Spread | None = None
    """Set by a soft gate or kernel: replaces the ratio."""
    gate: Callable[[Tensor], Spread] | None = None
    """Set with `value`: computes the factor on the gradient for the diagnostics. Its argument is scratch space."""
    selected: Spread | None = None
    """0/1: tokens the trust region leaves in."""
    kept: Spread | None = None
    """0/1: responses a trust part did not reject; counts as `keep` for `denominator = "kept"`."""
    band: tuple[Tensor | float, Tensor | float] | None = None
    """Bounds on log_ratio whatever the sign of the advantage, for the diagnostics."""
    adapts: bool = False
    """Whether the band has a state that follows the updates, which then must be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The band of a trust region: beyond it a ratio has no gradient on the side its advantage pushes to.

    Distances are of r from 1, from 1 - low to 1 + high; with `logarithmic` of log r from 0, from -low to high.
    """

    low: float | None
    """None: no lower bound."""
    high: float | None
    """None: no upper bound."""
    logarithmic: bool = False
    of: Literal["ratio", "tokens"] = "ratio"
    """What is bounded: the ratio at its level, or the log-ratio of each token before the mean is taken."""
    fields: tuple[str, ...] = ()
    """The fields of the part that hold the distances: multiplying them tightens the band. Empty: it cannot be tightened."""

    @property
    def lower(self) -> float:
        """The lower bound on log r; a distance of 1 or more from r = 1 is none."""
        if self.low is None:
            return -math.inf
        return -self.low if self.logarithmic else math.log1p(-self.low) if self.low < 1 else -math.inf

    @property
    def upper(self) -> float:
        """The upper bound on log r."""
        if self.high is None:
            return math.inf
        return self.high if self.logarithmic else math.log1p(self.high)

    @property
    def is_open(self) -> bool:
        """Whether there is no bound on either side."""
        return self.low is None and self.high is None

    def record(self) -> dict[str, Any]:
        """The bounds on log r as a run records them; None for no bound."""
        lower, upper = (bound if math.isfinite(bound) else None for bound in (self.lower, self.upper))
        return {"lower": lower, "upper": upper, "of": self.of, "fields": list(self.fields)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """The result of a correction. All tensors are detached."""

    log_shift: PerToken | None = None
    """Added to the token log-ratios before any clip."""
    weight: Spread | None = None
    """Multiplies the policy term; denominators are unchanged, also where it is 0."""
    keep: Spread | None = None
    """0/1: multiplies the policy term, and leaves the denominators only under `denominator = "kept"`."""


class _Slot(Part):
    __slots__ = ()
    scope: ClassVar[Scope] = Scope.ROW

    def needs(self) -> tuple[str, ...]:
        """Names of the optional signals this part reads."""
        return ()

    def initial(self) -> PartState | None:
        """The first state of an adaptive part; None for the others."""
        return None

    def advance(self, state: PartState, sums: Sums, first: bool) -> PartState:
        """The next state, from the sums of one whole update. `first`: it was the first update on its rollouts."""
        return state

    def calibrated(self, state: PartState, noise: float) -> PartState:
        """The state with a measured noise floor: how far the bounded ratio is from 1 with nothing trained."""
        return state


class Ratio(_Slot):
    """How the new policy is compared with the anchor: at which level, and through what the gradient flows."""

    __slots__ = ()
    kind: ClassVar[str] = "ratio"
    reads_anchor: ClassVar[bool] = False
    """Whether `tokens` are new - anchor."""
    gradient: ClassVar[Literal["through", "carrier", "weight"]] = "through"
    needs_groups: ClassVar[bool] = False
    level: Level

    def tokens(self, signals: Signals) -> PerToken:
        """The log-ratio of each token, 0 outside the mask."""
        raise NotImplementedError

    def reduce(self, tokens: PerToken, context: Context) -> Spread:
        """The log-ratio of each segment, from those of its tokens."""
        raise NotImplementedError

    def tables(self, signals: Signals) -> dict[str, PerSequence]:
        """Per-row, anchor-side numbers whose group sums belong in the counts (group scope only)."""
        return {}


class Trust(_Slot):
    """How far the ratio may carry a gradient."""

    __slots__ = ()
    kind: ClassVar[str] = "trust"
    rejects: ClassVar[bool] = False
    """Whether it drops responses (through `Region.kept`) by reading the new log-probs."""
    folds_weights: ClassVar[bool] = False
    """Whether correction weights enter its ratio and do not multiply the term a second time."""
    role: ClassVar[Literal["clip", "gate", "drop"]] = "drop"
    """'clip' bounds the ratio, 'gate' puts a function of it in its place, 'drop' leaves tokens or responses out."""
    reads_ratio: ClassVar[bool] = True
    """Whether the part has no meaning without a ratio."""
    adapts: ClassVar[bool] = False
    """Whether its band is part of the state and changes with the updates."""
    searches: ClassVar[bool] = False
    """Whether it searches its band anew in each update, so that no bounds can be stated beforehand."""
    weight_form_only: ClassVar[bool] = False
    """Whether it bounds a detached weight, so that a ratio that is differentiated through would lose its gradient."""
    in_tables: ClassVar[tuple[str, ...]] = ()
    """The fields that describe the part in a table if it states no bounds."""

    def apply(self, region: Region, context: Context) -> Region:
        raise NotImplementedError

    def bounds(self, state: PartState | None) -> Bounds | None:
        """The current band, or None if the part has none. `state` is the state of this part; None: its first state.

        A run compares the noise of the ratio with this band, records the band and may tighten it.
        """
        return None

    def compared(self, log_ratio: Spread, context: Context) -> Spread:
        """The values that an adaptive band bounds."""
        return log_ratio


class TokenTrust(Trust):
    """A trust region on token log-ratios before they are averaged."""

    __slots__ = ()

    def apply_tokens(self, tokens: PerToken, context: Context) -> PerToken:
        raise NotImplementedError


class Correction(_Slot):
    """A correction for a sampler that differs from the anchor. It reads old and sampler log-probs only."""

    __slots__ = ()
    kind: ClassVar[str] = "correction"
    weighs: ClassVar[bool] = False
    """Whether it is an importance weight from the sampler to the anchor."""
    reads_ratio: ClassVar[bool] = False
    """Whether the part has no meaning without a ratio."""

    def apply(self, context: Context) -> Adjustment:
        raise NotImplementedError


class Penalty(_Slot):
    """A term added to the loss."""

    __slots__ = ()
    kind: ClassVar[str] = "penalty"
    channels: ClassVar[tuple[str, ...]] = ("logprobs",)
    """The differentiable channels its gradient reaches."""
    token_mean: ClassVar[bool] = False
    """Whether it is always a token mean, whatever the aggregate, so that its coefficient keeps its meaning."""

    def apply(self, context: Context) -> Spread:
        """The penalty of each token, coefficient included, as it is added to the loss."""
        raise NotImplementedError


class Aggregate(_Slot):
    """How per-token terms become one number: the weight of a token is constant along its row."""

    __slots__ = ()
    kind: ClassVar[str] = "aggregate"
    needs_groups: ClassVar[bool] = False
    denominator: str

    def weights(self, tally: Tally, lengths: Tensor, group: Tensor | None) -> Tensor:
        """[B, 1]: the weight of each token of a row. `lengths` [B, 1] are the rollouts' lengths under the same tally."""
        raise NotImplementedError
