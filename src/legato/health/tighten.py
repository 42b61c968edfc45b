"""Narrowing the clip of an algorithm."""

from legato.algorithms.algorithm import Algorithm
from legato.algorithms.override import override


def clip_bounds(algorithm: Algorithm) -> dict[str, float]:
    """Return the bounds of the trust regions by config path. Caps, gates and adaptive bands have none."""
    parts = {part.name: part for part in algorithm.objective.trust}
    values = {
        f"objective.trust.{name}.{field}": getattr(parts[name], field)
        for name, bounds in algorithm.objective.bounds().items()
        for field in bounds.fields
    }
    return {path: value for path, value in values.items() if isinstance(value, int | float)}


def tighten_clip(algorithm: Algorithm, factor: float) -> Algorithm:
    """Return the algorithm with its clip bounds multiplied by `factor`."""
    if factor == 1:
        return algorithm
    return override(algorithm, {path: value * factor for path, value in clip_bounds(algorithm).items()})
