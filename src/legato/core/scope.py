"""How much of an update one call must contain for its coefficients to be right."""

from enum import IntEnum


class Scope(IntEnum):
    """How much of an update a part reads. The scope of an objective is the largest scope of its parts."""

    ROW = 0
    """A row and the counts are enough: any split of the update is exact."""
    GROUP = 1
    """Also reads sums over the group's old log-probs. The counts carry these sums, so any split is exact."""
    UPDATE = 2
    """Needs the new log-probs of the whole update: coefficients are computed once, over all of it, and sliced."""
