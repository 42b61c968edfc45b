"""Problems by number: the order of a run is a pure function of its seed, so the place in it is one integer.

Held-out problems are decided by the hash of their prompt. What is trained on and what is evaluated share no prompt,
whatever the seed, the shuffle or the number of epochs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from legato.core.fields import flag, integer, number
from legato.core.rollout import Problem
from legato.core.settings import settings
from legato.errors import InputError
from legato.tasks.task import Split, Task, held_out


@runtime_checkable
class Source(Protocol):
    """Training problems by number, and a fixed list of held-out ones."""

    @property
    def size(self) -> int | None:
        """How many training problems there are before they repeat; None: as good as endless."""

    def training(self, number: int) -> Problem:
        """The problem at this place of the run's order; numbers go on for ever, epoch after epoch."""

    def held_out(self, count: int) -> list[Problem]:
        """Different problems that are never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Problems made by a task. With `size` an epoch is that many of them, drawn once and repeated."""

    split: Split
    seed: int
    size: int | None = None

    def training(self, number: int) -> Problem:
        if self.size is not None:
            epoch, place = divmod(number, self.size)
            number = _order(self.size, self.seed, epoch)[place]
        return self.split.training_problem(self.seed, number)

    def held_out(self, count: int) -> list[Problem]:
        return self.split.held_out(count)


class Pool:
    """Problems from data, shuffled anew each epoch."""

    def __init__(self, problems: Sequence[Problem], *, share: float, seed: int, shuffle: bool = True) -> None:
        different = list({problem.key: problem for problem in reversed(problems)}.values())[::-1]
        self._held_out = [problem for problem in different if held_out(problem, share)]
        self._training = [problem for problem in different if not held_out(problem, share)]
        self._seed, self._shuffle = seed, shuffle
        if not self._training:
            raise InputError(f"the task has {len(problems)} problems and none is left to train on; give more problems")

    @property
    def size(self) -> int:
        return len(self._training)

    def training(self, number: int) -> Problem:
        epoch, place = divmod(number, len(self._training))
        return self._training[_order(len(self._training), self._seed, epoch)[place] if self._shuffle else place]

    def held_out(self, count: int) -> list[Problem]:
        if not self._held_out:
            raise InputError("no problem is held out to evaluate on; raise task.held_out_share or give more problems")
        return self._held_out[:count]


@dataclass(slots=True, kw_only=True)
class Joined:
    """Two stages: the first source alone for so many steps, then both in turn."""

    first: Source
    second: Source
    after_steps: int
    after: int | None = None
    """The number of the first problem of the second stage, once it has begun: steps may draw more or fewer than planned."""

    @property
    def size(self) -> int | None:
        sizes = self.first.size, self.second.size
        return None if sizes[0] is None or sizes[1] is None else sizes[0] + sizes[1]

    def training(self, number: int) -> Problem:
        if self.after is None or number < self.after:
            return self.first.training(number)
        later = number - self.after
        return self.second.training(later // 2) if later % 2 else self.first.training(self.after + later // 2)

    def held_out(self, count: int) -> list[Problem]:
        half = self.second.held_out(max(1, count // 2))
        return self.first.held_out(max(1, count - len(half))) + half


@settings()
class SourceSettings:
    """How problems are divided and ordered."""

    held_out_share: float = number(
        default=0.2,
        says="The share of all problems, chosen by hash, that is never trained on.",
        above=0.0,
        below=1.0,
        resume="refused",
    )
    shuffle: bool = flag(default=True, says="Whether the order of the problems changes from epoch to epoch.")
    problems_per_epoch: int | None = integer(
        default=None,
        says="For tasks made in code: how many drawn problems make an epoch; absent: never the same list twice.",
        minimum=1,
        optional=True,
    )

    def pool(self, problems: Sequence[Problem], seed: int) -> Pool:
        """Problems from data."""
        return Pool(problems, share=self.held_out_share, seed=seed, shuffle=self.shuffle)

    def generated(self, task: Task, seed: int) -> Generated:
        """Problems made by a task."""
        return Generated(split=Split(task=task, share=self.held_out_share), seed=seed, size=self.problems_per_epoch)


_ORDERS: dict[tuple[int, int, int], list[int]] = {}


def _order(size: int, seed: int, epoch: int) -> list[int]:
    """A permutation that depends on the three numbers alone; the last few are kept."""
    key = (size, seed, epoch)
    if key not in _ORDERS:
        while len(_ORDERS) >= 4:
            _ORDERS.pop(next(iter(_ORDERS)))
        order = list(range(size))
        random.Random(f"order {seed} {epoch}").shuffle(order)
        _ORDERS[key] = order
    return _ORDERS[key]
