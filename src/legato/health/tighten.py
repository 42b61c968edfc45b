"""The clip of a run made narrower."""

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.override import override


def clip_bounds(algorithm: Algorithm) -> dict[str, float]:
    """The fields that hold the bounds of the trust regions, by path; caps, gates and bands that adapt have none."""
    parts = {part.name: part for part in algorithm.objective.trust}
    values = {
        f"objective.trust.{name}.{field}": getattr(parts[name], field)
        for name, bounds in algorithm.objective.bounds().items()
        for field in bounds.fields
    }
    return {path: value for path, value in values.items() if isinstance(value, int | float)}


def tighten_clip(algorithm: Algorithm, factor: float) -> Algorithm:
    """The algorithm with those bounds multiplied."""
    if factor == 1:
        return algorithm
    return override(algorithm, {path: value * factor for path, value in clip_bounds(algorithm).items()})
