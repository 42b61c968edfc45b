"""Estimates how long the rest of a run takes."""

from collections import deque

_WINDOW = 100
"""Steps in the estimate: enough to include evaluations and checkpoints, few enough to follow responses that grow."""


class Pace:
    """The speed of the steps after the first one, which also compiles, measures the numerics and loads what others reuse."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_WINDOW + 1)

    def seconds_left(self, now: float, remaining: int) -> float | None:
        """Record the end of a step and return the seconds that `remaining` more take; None after the first step.

        Steps that a recovery discards count: they take as long as the others.
        """
        self._ends.append(now)
        if len(self._ends) < 2:
            return None
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * remaining
