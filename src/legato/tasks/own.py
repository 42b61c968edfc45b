"""Tasks of the user's: whatever their methods do, a run either gets a problem or a clear error."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from legato.core.protection import settings_restored
from legato.core.rollout import Problem
from legato.core.user_code import CallFailedError, UserCode
from legato.errors import InputError, describe_value

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class OwnTask:
    """A task with `problem(random)` or `load()`, each call of which has a deadline and may raise anything."""

    task: Any
    name: str
    """How the task is named in errors: `task.kind = 'file.py:Name'`."""
    seconds: float | None

    def problem(self, random: random.Random) -> Problem:
        """A problem that the task draws."""
        return self._call("problem(random)", lambda: _check_problem(self.task.problem(random)))

    def load(self) -> list[Problem]:
        """All problems of the task."""
        return self._call("load()", lambda: [_check_problem(each) for each in self.task.load()])

    def _call(self, method: str, function: Callable[[], _T]) -> _T:
        with settings_restored(), UserCode(f"the task's {method}", self.seconds, "task.timeout_seconds") as code:
            try:
                return code.call(function)
            except CallFailedError as error:
                raise InputError(
                    f"expected a problem, got {error} ({method} of {self.name}); correct the task"
                ) from error.__cause__


def _check_problem(problem: Any) -> Problem:
    if not isinstance(problem, Problem):
        raise TypeError(f"expected a legato.Problem, got {describe_value(problem)}")
    return problem
