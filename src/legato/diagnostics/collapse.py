"""The definition of a collapsed run that reports and comparisons share."""

from collections.abc import Sequence

Measured = tuple[float, float, float]
"""Held-out accuracy with the ends of its 95 % interval."""

DEFINITION = (
    "A run collapsed if its last held-out accuracy (sampled) is below where it started, or below half of the best it"
    " reached, and the 95 % intervals of the two measurements do not touch."
)


def collapse(accuracies: Sequence[Measured]) -> str | None:
    """Return why a sequence of accuracies is a collapse; None if it is not one.

    Accuracies whose intervals touch are no collapse: 1 right answer in 4 after 3 in 4 is chance.
    """
    if not accuracies:
        return None
    start, end, best = accuracies[0], accuracies[-1], max(accuracies)
    if _below(end, best) and end[0] < 0.5 * best[0]:
        return f"ended at {end[0]:.1%} after a best of {best[0]:.1%}"
    return f"ended at {end[0]:.1%}, below its start of {start[0]:.1%}" if _below(end, start) else None


def _below(one: Measured, other: Measured) -> bool:
    return one[0] < other[0] and one[2] < other[1]
