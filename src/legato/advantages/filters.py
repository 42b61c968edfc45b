"""Filters on samples. They return `keep`: nothing is removed here, and the mask never changes."""

from dataclasses import dataclass
from typing import ClassVar

from legato.advantages.siblings import compare
from legato.core.parts import Part, integer, part
from legato.core.segments import renumber
from legato.core.shapes import PerSequence, RowIds, RowMask
from legato.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The inputs of a filter: one entry per response of a step."""

    accuracy: PerSequence
    """The unshaped metric. Filtering on a shaped reward would let a length penalty revive dead groups."""
    group: RowIds
    """[B], any integers."""
    truncated: RowMask | None = None
    """Whether the response was cut off at the length limit."""
    version_lag: RowIds | None = None
    """How many versions of the policy ago the oldest token was sampled."""


class Filter(Part):
    """Decides for each response whether its policy term stays."""

    __slots__ = ()
    kind: ClassVar[str] = "filter"

    def keep(self, samples: Samples) -> RowMask:
        raise NotImplementedError


@part("filter", "zero-variance")
class ZeroVariance(Filter):
    """Drop groups whose responses all score the same: they carry no gradient (DAPO refills them with fresh prompts)."""

    def keep(self, samples: Samples) -> RowMask:
        return ~compare(samples.accuracy.double(), renumber(samples.group)).flat


@part("filter", "overlong")
class Overlong(Filter):
    """Drop truncated responses from the policy term. Their rewards stay in the group's baseline."""

    def keep(self, samples: Samples) -> RowMask:
        if samples.truncated is None:
            raise InputError("filter 'overlong' needs to know which responses were truncated; pass truncated=[B] bool")
        return samples.truncated == 0


@part("filter", "staleness")
class Staleness(Filter):
    """Drop responses sampled more than `most` policy versions ago."""

    most: int = integer(default=4, says="Largest version lag that stays.", minimum=0)

    def keep(self, samples: Samples) -> RowMask:
        if samples.version_lag is None:
            raise InputError("filter 'staleness' needs the version lag of each response; pass version_lag=[B]")
        return samples.version_lag <= self.most
