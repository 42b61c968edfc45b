"""A text maze: go n, e, s or w, one step a turn, to the goal."""

from typing import Any

from legato.core.parts import Part, integer, number, part
from legato.core.rollout import Problem, StopReason
from legato.rollouts.episodes import Reply
from legato.tasks.games import open_ways

_STEPS = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}


@part("environment", "maze")
class TextMaze(Part):
    """Find the goal of `task.kind = "maze"`. The reward is 1 for the step that reaches it, less `step_cost` a step."""

    steps: int = integer(default=10, says="The most steps of an episode.", minimum=1)
    step_cost: float = number(default=0.0, says="Taken off for each step.", minimum=0.0, maximum=1.0)
    deterministic = True

    @property
    def max_turns(self) -> int:
        return self.steps

    def episode(self, problem: Problem) -> "Walk":
        return Walk(dict(problem.fields), self.step_cost)

    def demonstrate(self, problem: Problem) -> list[str]:
        """A first step in some open direction, right or not."""
        ways = open_ways(dict(problem.fields), tuple(problem.fields["start"]))
        return [ways[int(problem.key, 16) % len(ways)]]


class Walk:
    """An episode. Its state is the place: episodes of a maze that stand at the same place are compared there (GiGPO)."""

    def __init__(self, maze: dict[str, Any], cost: float) -> None:
        self.maze, self.cost = maze, cost
        self.place, self.goal = tuple(maze["start"]), tuple(maze["goal"])

    def reply(self, text: str, stop: StopReason) -> Reply:
        way = text.strip()
        if len(way) == 1 and way in open_ways(self.maze, self.place):
            self.place = (self.place[0] + _STEPS[way][0], self.place[1] + _STEPS[way][1])
        if self.place == self.goal:
            return Reply(reward=1.0 - self.cost, done=True)
        x, y = self.place
        here = f"{x},{y} to {self.goal[0]},{self.goal[1]} {open_ways(self.maze, self.place)}:"
        return Reply(content=here, reward=-self.cost, state=self.place)
