"""Problems for the environments of `legato.environments`. A problem's fields hold what its episodes need to know."""

import random
from collections import deque
from typing import Any

from legato.core.parts import Part, integer, part
from legato.core.rollout import Problem

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_STEPS = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}


@part("task", "secret-number")
class SecretNumber(Part):
    """A number to find by guessing, for the environment `guess`: "game 48213:". The name of a game says nothing about it."""

    largest: int = integer(default=9, says="The numbers are 0 to this.", minimum=1, maximum=10**6)

    def problem(self, source: random.Random) -> Problem:
        secret = source.randint(0, self.largest)
        return Problem(prompt=f"game {source.randrange(10**5)}:", answer=str(secret), fields={"largest": self.largest})


@part("task", "maze")
class Maze(Part):
    """A way to find through a grid with walls, for the environment `maze`: "from 0,2 to 3,1:"."""

    size: int = integer(default=4, says="Width and height of the grid.", minimum=2, maximum=50)
    walls: int = integer(default=3, says="How many walls are tried; one that would cut off a field is left out.", minimum=0)

    def problem(self, source: random.Random) -> Problem:
        fields = [(x, y) for x in range(self.size) for y in range(self.size)]
        doors = {
            (field, way) for field in fields for way, (x, y) in _STEPS.items() if (field[0] + x, field[1] + y) in fields
        }
        for _ in range(self.walls):
            field, way = source.choice(sorted(doors))
            other = (field[0] + _STEPS[way][0], field[1] + _STEPS[way][1])
            fewer = doors - {(field, way), (other, {"n": "s", "s": "n", "e": "w", "w": "e"}[way])}
            if len(_distances(fewer, (0, 0))) == len(fields):
                doors = fewer
        start, goal = source.sample(fields, 2)
        maze: dict[str, Any] = {"doors": sorted([[*field, way] for field, way in doors]), "start": [*start], "goal": [*goal]}
        name = source.randrange(10**3)  # mazes with equal ends are different problems
        prompt = f"maze {name} from {start[0]},{start[1]} to {goal[0]},{goal[1]} {open_ways(maze, start)}:"
        return Problem(prompt=prompt, answer=_way(doors, start, goal), fields=maze)


def open_ways(maze: dict[str, Any], place: tuple[int, int]) -> str:
    """The directions without a wall, as letters."""
    return "".join([str(way) for x, y, way in maze["doors"] if (x, y) == place])


def _distances(doors: set[tuple[tuple[int, int], str]], start: tuple[int, int]) -> dict[tuple[int, int], str]:
    """A shortest way to every field that can be reached."""
    ways, waiting = {start: ""}, deque([start])
    while waiting:
        place = waiting.popleft()
        for way, (x, y) in _STEPS.items():
            there = (place[0] + x, place[1] + y)
            if (place, way) in doors and there not in ways:
                ways[there] = ways[place] + way
                waiting.append(there)
    return ways


def _way(doors: set[tuple[tuple[int, int], str]], start: tuple[int, int], goal: tuple[int, int]) -> str:
    return _distances(doors, start)[goal]


@part("task", "facts")
class Facts(Part):
    """A question about a made-up fact, for the environment `search`: "age of tav?" -> "42"."""

    digits: int = integer(default=2, says="Digits of an answer.", minimum=1, maximum=9)

    def problem(self, source: random.Random) -> Problem:
        names = ["".join(source.choice(_LETTERS) for _ in range(3)) for _ in range(8)]
        ages = [str(source.randrange(10**self.digits)) for _ in names]
        documents = [f"{name} is {age}." for name, age in dict(zip(names, ages, strict=True)).items()]
        name, _, answer = source.choice(documents)[:-1].partition(" is ")
        return Problem(prompt=f"age of {name}?", answer=answer, fields={"documents": documents})
