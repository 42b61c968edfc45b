"""Tasks that generate problems, and their split into training and held-out problems."""

import hashlib
import random
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from legato.core.rollout import Problem
from legato.errors import InputError


@runtime_checkable
class Task(Protocol):
    """A source of problems. `problem(random)` draws one; equal random states draw equal problems."""

    def problem(self, random: random.Random) -> Problem: ...


def held_out(problem: Problem, share: float) -> bool:
    """Whether a problem is held out. The hash of its prompt decides, so the answer never changes."""
    digest = hashlib.blake2b(problem.key.encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "big") / 2**64 < share


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A task in two parts that share no prompt."""

    task: Task
    share: float
    """The held-out share of all problems."""

    def training_problem(self, seed: int, number: int) -> Problem:
        """The training problem at position `number` for this seed; positions are drawn independently."""
        source = random.Random(f"training {seed} {number}")
        for _ in range(10_000):
            problem = self.task.problem(source)
            if not held_out(problem, self.share):
                return problem
        raise InputError("the task drew 10000 held-out problems in a row; lower task.held_out_share")

    def held_out(self, count: int, seed: int = 0, attempts_per_problem: int = 1000) -> list[Problem]:
        """`count` distinct held-out problems; they depend only on the seed."""
        drawn: dict[str, Problem] = {}
        source = random.Random(f"held out {seed}")
        misses = 0
        # A task with few problems ends this long before `count * attempts_per_problem` draws: it draws the same ones again.
        while misses <= attempts_per_problem * min(count, max(20, len(drawn))):
            problem = self.task.problem(source)
            fresh = held_out(problem, self.share) and problem.key not in drawn
            misses = 0 if fresh else misses + 1
            if fresh:
                drawn[problem.key] = problem
            if len(drawn) == count:
                return list(drawn.values())
        raise InputError(
            f"held_out = {count} is more than the task has: {len(drawn)} different held-out problems were found;"
            " hold out fewer, or make the task larger"
        )
