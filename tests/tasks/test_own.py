"""Tasks of the user's that hang, exit or return odd things: an error that names them, and nothing else."""

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from legato.core.rollout import Problem
from legato.core.user_code import is_own
from legato.errors import InputError
from legato.tasks.own import OwnTask
from legato.tasks.procedural import Arithmetic


class Odd:
    """A task whose methods do what they are told."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def problem(self, random: random.Random) -> Problem:
        return self.action()  # type: ignore[no-any-return]

    def load(self) -> Iterator[Problem]:
        yield self.action()


def leave() -> None:
    raise SystemExit(0)


def interrupt() -> None:
    raise KeyboardInterrupt


def hang() -> None:
    while True:
        time.sleep(1)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (hang, r"timed out after 0\.1 s"),
        (leave, "SystemExit: 0"),
        (interrupt, "KeyboardInterrupt: "),
        (lambda: "2+3=", r"TypeError: expected a legato\.Problem, got '2\+3='"),
    ],
    ids=["hangs", "exits", "interrupts", "no problem"],
)
def test_a_task_that_fails_is_named(action: Any, reason: str) -> None:
    task = OwnTask(Odd(action), "task.kind = 'mine.py:Odd'", 0.1)
    with pytest.raises(InputError, match=rf"got {reason} \(problem\(random\) of task\.kind = 'mine\.py:Odd'\)"):
        task.problem(random.Random(0))
    with pytest.raises(InputError, match=rf"got {reason} \(load\(\) of"):
        task.load()


def test_a_task_cannot_change_the_settings_of_the_process() -> None:
    def meddle() -> Problem:
        os.chdir("/")
        torch.set_grad_enabled(False)
        return Problem(prompt="?")

    folder = os.getcwd()
    assert OwnTask(Odd(meddle), "problems", 5.0).problem(random.Random(0)) == Problem(prompt="?")
    assert os.getcwd() == folder and torch.is_grad_enabled()


def test_the_tasks_of_legato_are_called_directly() -> None:
    assert is_own(Odd(None)) and not is_own(Arithmetic())
