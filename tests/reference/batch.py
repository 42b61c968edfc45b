"""One update as lists of Python floats.

Rows have equal width; `mask` marks the positions that count as tokens. Other positions (padding, tool tokens, NaN) are
never read: every loop of this package runs over `positions(row)`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

Rows = list[list[float]]


class Result(NamedTuple):
    """A loss and its derivative with respect to each new log-prob (0 outside the mask)."""

    loss: float
    gradient: Rows

    def __add__(self, other: "Result") -> "Result":  # type: ignore[override]
        gradient = [
            [a + b for a, b in zip(left, right, strict=True)]
            for left, right in zip(self.gradient, other.gradient, strict=True)
        ]
        return Result(self.loss + other.loss, gradient)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """New, old, sampler (`roll`) and reference log-probs, advantages per token, and what some members need besides."""

    new: Rows
    old: Rows
    mask: list[list[bool]]
    advantages: Rows
    group: list[int]
    roll: Rows | None = None
    kept_logmass: Rows | None = None
    ref: Rows | None = None
    turn: list[list[int]] | None = None
    gamma: Rows | None = None
    entropy: Rows | None = None
    uniform: Rows | None = None
    values: Rows | None = None
    old_values: Rows | None = None
    returns: Rows | None = None

    def positions(self, row: int) -> list[int]:
        """The tokens of a row: positions inside the mask."""
        return [position for position, counted in enumerate(self.mask[row]) if counted]

    def filled_rows(self) -> list[int]:
        """Rows with at least one token. The others are absent: they enter no sum and no count."""
        return [row for row in range(len(self.mask)) if any(self.mask[row])]

    def tokens(self) -> Iterator[tuple[int, int]]:
        """All (row, position) pairs inside the mask."""
        for row in self.filled_rows():
            for position in self.positions(row):
                yield row, position

    def token_count(self) -> int:
        """T_tot: tokens of the whole update."""
        return sum(1 for _ in self.tokens())

    def zeros(self) -> Rows:
        """A row of zeros for each row, as wide as the batch."""
        return [[0.0] * len(mask) for mask in self.mask]

    def advantage(self, row: int) -> float:
        """A_i of a row whose advantage does not vary."""
        return self.advantages[row][self.positions(row)[0]]

    def segments(self, level: str) -> Iterator[tuple[int, list[int]]]:
        """The sets of tokens that share one ratio: each token, each turn of a row, or the whole row."""
        for row in self.filled_rows():
            positions = self.positions(row)
            if level == "token":
                yield from ((row, [position]) for position in positions)
            elif level == "turn":
                turns = self.turn[row]
                for turn in sorted({turns[position] for position in positions}):
                    yield row, [position for position in positions if turns[position] == turn]
            else:
                yield row, positions


def numerical_gradient(objective: Callable[[Batch], Result], batch: Batch, step: float = 1e-6) -> Rows:
    """Central differences of the loss in each new log-prob: the check on the gradients written by hand."""
    gradient = batch.zeros()
    for row, position in batch.tokens():
        shifted = []
        for sign in (1, -1):
            new = [list(values) for values in batch.new]
            new[row][position] += sign * step
            shifted.append(objective(replace(batch, new=new)).loss)
        gradient[row][position] = (shifted[0] - shifted[1]) / (2 * step)
    return gradient


def mean(values: list[float]) -> float:
    """Arithmetic mean, summed without rounding."""
    return math.fsum(values) / len(values)


def deviation(values: list[float], ddof: int = 0) -> float:
    """Standard deviation; ddof 0 is the population's."""
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - ddof))


def clamp(value: float, low: float, high: float) -> float:
    """The nearest number inside [low, high]."""
    return max(low, min(high, value))
