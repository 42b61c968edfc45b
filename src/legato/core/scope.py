"""How much of an update a part must see before its coefficients are right."""

from enum import IntEnum


class Scope(IntEnum):
    """Ordered: the scope of a composition is the largest of its parts'."""

    ROW = 0
    """A row and the counts are enough: any split of the update is exact."""
    GROUP = 1
    """Also needs sums over anchor-side tensors of the group; they travel in the counts, so any split is exact."""
    UPDATE = 2
    """Needs the new log-probs of the whole update: coefficients are computed once, over all of it, and sliced."""
