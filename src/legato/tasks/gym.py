"""Problems of Reasoning Gym: a hundred families made in code, each by the name of its data set.

The reward that goes with it is `reasoning-gym` (`rewards/gym.py`): many of its problems have more than one right answer.
"""

import random
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from legato.core.parts import Part, mapping, nearest, part, text
from legato.core.rollout import Problem
from legato.errors import InputError
from legato.workers.pool import DiedError, RefusedError, TimedOutError, shared

WORKER = "legato.tasks.gym_worker:entry"
SECONDS = 60.0
"""Time limit for one problem; the slowest data sets take about one second."""


@part("task", "reasoning-gym")
class ReasoningGym(Part):
    """A data set of Reasoning Gym: dataset = "chain_sum", settings = {min_terms = 2, max_terms = 4}."""

    dataset: str = text(says="The name of the data set.")
    settings: Mapping[str, Any] | tuple[tuple[str, Any], ...] = mapping(says="Its own settings; seed and size are ours.")

    def __post_init__(self) -> None:
        if find_spec("reasoning_gym") is None:
            raise InputError("task 'reasoning-gym' needs the package reasoning-gym; pip install 'legato[gym]'")
        taken = sorted({"seed", "size"} & set(dict(self.settings)))
        if taken:
            raise InputError(f"task 'reasoning-gym': settings.{taken[0]} is drawn for each problem and cannot be set")
        # Draw one problem now, so that invalid settings are refused before a model is loaded.
        entry = self._entry(0)
        if "known" in entry:
            raise InputError(
                f"task 'reasoning-gym': unknown dataset {self.dataset!r}; {_nearest(self.dataset, entry['known'])}"
            )

    def problem(self, source: random.Random) -> Problem:
        entry = self._entry(source.randrange(2**31))
        fields = {
            "dataset": self.dataset,
            "settings": dict(self.settings),
            "metadata": entry["metadata"],
            "whole": entry["whole"],
        }
        return Problem(prompt=entry["question"], answer=entry["answer"], fields=fields)

    def _entry(self, seed: int) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = shared(WORKER).ask(self.dataset, dict(self.settings), seed, seconds=SECONDS)
            return entry
        except TimedOutError:
            reason = f"one problem took more than {SECONDS:g} s"
        except (DiedError, RefusedError) as error:
            reason = str(error)
        raise InputError(f"task 'reasoning-gym': dataset {self.dataset!r} with settings {dict(self.settings)}: {reason}")


def _nearest(word: str, names: list[str]) -> str:
    # Names of Reasoning Gym have underscores; `nearest` compares names with hyphens.
    close = nearest(word, [name.replace("_", "-") for name in names])
    return close.replace("-", "_")
