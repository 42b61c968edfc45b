"""Arithmetic with a calculator: the policy may call `calc`, then says the answer."""

import ast
import operator
from collections.abc import Callable

from legato.core.parts import Part, integer, part
from legato.core.rollout import Problem
from legato.environments.tools import ToolEpisode, schema_of
from legato.rollouts.episodes import Reply

_LARGEST = 10**12
_OPERATIONS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@part("environment", "calculator")
class Calculator(Part):
    """Answer problems of `task.kind = "arithmetic"` with a tool that calculates. The reward is 1 for the right answer."""

    turns: int = integer(default=3, says="The most turns of an episode, calls included.", minimum=1)
    deterministic = True

    @property
    def max_turns(self) -> int:
        return self.turns

    @property
    def tools(self) -> list[dict[str, object]]:
        return [schema_of(Sum.calc)]

    def episode(self, problem: Problem) -> "Sum":
        return Sum(problem)

    def demonstrate(self, problem: Problem) -> list[str]:
        """Every third problem with the calculator, the others by heart: what is worth more is left to training."""
        formula = str(problem.prompt).strip().rstrip("=")
        return [f"calc({formula})", str(problem.answer)] if int(problem.key, 16) % 3 == 0 else [str(problem.answer)]


class Sum(ToolEpisode):
    """One problem."""

    def calc(self, formula: str) -> int:
        """Calculate with whole numbers, +, - and *.

        Args:
            formula: For instance 12*34+5.
        """
        if len(formula) > 100:
            raise ValueError(f"expected at most 100 characters, got {len(formula)}")
        return _value(ast.parse(formula.strip(), mode="eval").body)

    def after_calls(self, results: object) -> Reply:
        return Reply(reward=0.0)

    def finish(self, text: str) -> Reply:
        return Reply(reward=float(text.strip() == str(self.problem.answer).strip()), done=True)


def _value(node: ast.expr) -> int:
    """The value of a parsed formula. Only numbers and three operations are evaluated; nothing is executed."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("expected whole numbers with +, - and *")
    if abs(value) > _LARGEST:
        raise ValueError(f"expected values up to {_LARGEST}")
    return value
