"""Rewards that check a response against the answer of its problem.

A reward is any callable `reward(rollout) -> float | dict[str, float] | Unscorable`. These are such callables, declared as
parts so that a configuration can name them. A wrong answer scores 0; `Unscorable` is for what could not be judged.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

from legato.core.parts import Part, choice, flag, number, part, pattern
from legato.core.rollout import Rollout, Unscorable
from legato.errors import InputError

Verdict = float | dict[str, float] | Unscorable
"""A reward that compares with the problem's answer has the class attribute `needs_answer = True`; one of Legato that only
reads the rollout, in time that grows with its length, `harmless = True`."""

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+")
_LONGEST_NUMBER = 1000
"""In digits. A longer number is an attack on the parser, not an answer."""


def _answer(rollout: Rollout) -> str | Unscorable:
    return Unscorable("the problem has no answer") if rollout.problem.answer is None else rollout.problem.answer


def read_number(text: str) -> Fraction | None:
    """The exact value of a number as people write it: 1,234.5, -3/4, .5; None if it is none."""
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    bottom = int(denominator) if denominator else 1
    return Fraction(numerator) / bottom if bottom else None


@part("reward", "exact")
class ExactMatch(Part):
    """1 if the response is the answer, to the letter but for white space at its ends."""

    ignore_case: bool = flag(default=False, says="Whether capitals are small letters.")

    needs_answer = True
    harmless = True

    def __call__(self, rollout: Rollout) -> Verdict:
        answer = _answer(rollout)
        if isinstance(answer, Unscorable):
            return answer
        response, right = rollout.text.strip(), answer.strip()
        return float(response.lower() == right.lower() if self.ignore_case else response == right)


@part("reward", "number")
class NumberMatch(Part):
    """1 if the number in the response equals the answer's, compared exactly as fractions."""

    which: str = choice("last", "only", default="last", says="'last': the last number written; 'only': nothing else may be.")
    tolerance: float = number(default=0.0, says="Largest difference that still counts as equal.", minimum=0.0)

    needs_answer = True
    harmless = True

    def __call__(self, rollout: Rollout) -> Verdict:
        answer = _answer(rollout)
        if isinstance(answer, Unscorable):
            return answer
        right = read_number(_last_number(answer) or "")
        if right is None:
            return Unscorable(f"the answer {answer[:40]!r} holds no number")
        text = rollout.text.strip() if self.which == "only" else _last_number(rollout.text)
        value = read_number(text or "")
        return float(value is not None and abs(value - right) <= Fraction(self.tolerance))


def _last_number(text: str) -> str | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return last.group() if last else None


@part("reward", "countdown")
class CountdownMatch(Part):
    """1 if the response is an expression that uses each given number once and reaches the target."""

    def __call__(self, rollout: Rollout) -> Verdict:
        fields = rollout.problem.fields
        if "numbers" not in fields or "target" not in fields:
            return Unscorable("the problem has no numbers and target; reward 'countdown' goes with task 'countdown'")
        try:
            value, used = _evaluate(rollout.text.strip())
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return 0.0
        return float(value == fields["target"] and sorted(used) == sorted(fields["numbers"]))


_ALLOWED: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression of + - * / and whole numbers, and the numbers in it. Nothing is executed."""
    if len(text) > 200:
        raise InputError("too long")
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _ALLOWED:
            return Fraction(_ALLOWED[type(node.op)](value(node.left), value(node.right)))
        raise InputError("not an expression of whole numbers")

    return value(ast.parse(text, mode="eval").body), used


@part("reward", "format")
class FormatMatch(Part):
    """1 if the whole response matches a regular expression."""

    pattern: str = pattern(default=r"(?s).*\S.*", says="The regular expression; by default anything but nothing.")

    def __call__(self, rollout: Rollout) -> Verdict:
        return float(re.fullmatch(self.pattern, rollout.text) is not None)


@part("reward", "length")
class LengthPenalty(Part):
    """0 up to `free` tokens, then falling linearly to -1 at `most`."""

    free: float = number(default=256.0, says="Tokens that cost nothing.", minimum=0.0)
    most: float = number(default=512.0, says="Tokens at which the penalty is full.", above=0.0)

    harmless = True

    def __post_init__(self) -> None:
        if self.free >= self.most:
            raise InputError(f"reward 'length': free = {self.free:g} is not below most = {self.most:g}")

    def __call__(self, rollout: Rollout) -> Verdict:
        length = int(rollout.mask.sum())
        return -min(1.0, max(0.0, (length - self.free) / (self.most - self.free)))


LARGEST_REWARD = 1e15
"""Squares of larger rewards, which every group's deviation needs, overflow in float32."""


def as_number(value: Any) -> float | None:
    """A verdict as a float: numbers, bools, and numpy and torch values of one element. None if it is none of these, not
    finite, or beyond LARGEST_REWARD."""
    if not isinstance(value, int | float) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):
            return None
    if not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if abs(number) <= LARGEST_REWARD else None


def finite(value: Any) -> bool:
    """Whether a value can be a verdict, or a part of one."""
    return as_number(value) is not None
