'''Everything that a part of your own imports: the declaration, the slots of an algorithm, and the arguments of a part.

    # my_clip.py
    from dataclasses import replace
    from legato.parts import Bounds, Trust, by_sign, number, part


    @part("trust", "my-clip")
    class MyClip(Trust):
        """A sentence for `legato explain my_clip.py:MyClip`."""

        role = "clip"
        under: float = number(default=0.2, says="Distance of the lower bound from 1.", minimum=0.0)
        over: float = number(default=0.3, says="Distance of the upper bound from 1.", minimum=0.0)

        def bounds(self, state):
            return Bounds(low=self.under, high=self.over, fields=("under", "over"))

        def apply(self, region, context):
            band = self.bounds(None)
            clipped = by_sign(region.log_value, context.signals.advantages, band.lower, band.upper)
            return replace(region, log_value=clipped)

A recipe names the file, and a field by the name of the part:

    [algorithm]
    name = "gspo"
    "objective.trust" = ["my_clip.py:MyClip"]
    "objective.trust.my-clip.over" = 0.1

A path is relative to the directory in which the run is started. Without `@part` the part is named
after its class ("my-clip" for MyClip) and only its path finds it. With `@part` its name works too once the file is
imported. `python -m pytest tests/contracts --part my_clip.py:MyClip` tests whether the part keeps the contract of its slot.
'''

from legato.advantages.estimator import Estimate, Estimator, Scores
from legato.advantages.filters import Filter, Samples
from legato.core.bounded import bounded
from legato.core.parts import choice, flag, integer, mapping, number, numbers, part, pattern, text
from legato.core.scope import Scope
from legato.objectives.clips import by_sign, leave_out
from legato.objectives.slots import (
    Adjustment,
    Aggregate,
    Bounds,
    Context,
    Correction,
    PartState,
    Penalty,
    Ratio,
    Region,
    TokenTrust,
    Trust,
)

__all__ = [
    "Adjustment",
    "Aggregate",
    "Bounds",
    "Context",
    "Correction",
    "Estimate",
    "Estimator",
    "Filter",
    "PartState",
    "Penalty",
    "Ratio",
    "Region",
    "Samples",
    "Scope",
    "Scores",
    "TokenTrust",
    "Trust",
    "bounded",
    "by_sign",
    "choice",
    "flag",
    "integer",
    "leave_out",
    "mapping",
    "number",
    "numbers",
    "part",
    "pattern",
    "text",
]
