"""A task of your own: problems that are made in code.

legato train recipes/tiny.toml task.kind=examples/own_task.py:Doubles
"""

import random
from dataclasses import dataclass

import legato


@dataclass(frozen=True)
class Doubles:
    """Double a number. The fields of the class are options of the task: `task.largest=50`."""

    largest: int = 99

    def problem(self, random: random.Random) -> legato.Problem:
        """Draw a problem. Equal states of `random` must give equal problems: a resumed run draws them again."""
        number = random.randint(1, self.largest)
        return legato.Problem(prompt=f"{number}+{number}=", answer=str(2 * number))
