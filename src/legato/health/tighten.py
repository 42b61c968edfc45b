"""The clip of a run made narrower."""

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.override import flatten, override

_BOUNDS = ("low", "high", "log_low", "log_high")


def clip_bounds(algorithm: Algorithm) -> dict[str, float]:
    """The bounds that the trust region puts on the ratio, by path; caps and gates have none."""
    bands = {part.name for part in algorithm.objective.trust if part.reads_ratio}
    found = {}
    for path, value in flatten(algorithm).items():
        slot, _, rest = path.partition("objective.trust.")
        part, _, field = rest.rpartition(".")
        if not slot and part in bands and field in _BOUNDS and isinstance(value, float):
            found[path] = value
    return found


def tightened(algorithm: Algorithm, factor: float) -> Algorithm:
    """The algorithm with those bounds multiplied."""
    if factor == 1:
        return algorithm
    return override(algorithm, {path: value * factor for path, value in clip_bounds(algorithm).items()})
