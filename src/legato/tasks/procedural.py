"""Problems made in code: they need no data and no network, and their answers are certain."""

import random
from collections.abc import Callable
from itertools import permutations

from legato.core.parts import Part, choice, flag, integer, part
from legato.core.rollout import Problem
from legato.errors import InputError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _number(source: random.Random, digits: int) -> int:
    """A random number with exactly `digits` digits (one digit: 0 to 9)."""
    return source.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


@part("task", "arithmetic")
class Arithmetic(Part):
    """a+b, a-b or a*b with operands of a given number of digits: "37+5=" -> "42"."""

    wording: str = choice(
        "formula", "question", default="formula", says="'formula': 37+5=; 'question': What is 37 + 5? for chat models."
    )
    graded: bool = flag(
        default=False, says="Draw each operand's digits from 1 to the number given; the sum is the problem's field `grade`."
    )

    operation: str = choice("add", "subtract", "multiply", default="add", says="Which operation.")
    left_digits: int = integer(default=2, says="Digits of the first operand.", minimum=1, maximum=1000)
    right_digits: int = integer(default=1, says="Digits of the second operand.", minimum=1, maximum=1000)

    def problem(self, source: random.Random) -> Problem:
        digits = self.left_digits, self.right_digits
        if self.graded:
            digits = source.randint(1, self.left_digits), source.randint(1, self.right_digits)
        left, right = _number(source, digits[0]), _number(source, digits[1])
        sign, value = {
            "add": ("+", left + right),
            "subtract": ("-", left - right),
            "multiply": ("*", left * right),
        }[self.operation]
        formula = f"{left}{sign}{right}="
        prompt = formula if self.wording == "formula" else f"What is {left} {sign} {right}?"
        return Problem(prompt=prompt, answer=str(value), fields={"grade": sum(digits)})


@part("task", "reversal")
class Reversal(Part):
    """A string of digits or letters to write backwards: "4071=" -> "1704"."""

    length: int = integer(default=4, says="How many symbols.", minimum=1, maximum=100_000)
    symbols: str = choice("digits", "letters", default="digits", says="Of what.")

    def problem(self, source: random.Random) -> Problem:
        alphabet = "0123456789" if self.symbols == "digits" else _LETTERS
        text = "".join(source.choice(alphabet) for _ in range(self.length))
        return Problem(prompt=f"{text}=", answer=text[::-1])


@part("task", "sorting")
class Sorting(Part):
    """Numbers to put in order: "31 4 15=" -> "4 15 31"."""

    count: int = integer(default=3, says="How many numbers.", minimum=2, maximum=10_000)
    digits: int = integer(default=1, says="Largest number of digits of each.", minimum=1, maximum=1000)

    def problem(self, source: random.Random) -> Problem:
        numbers = [source.randrange(10**self.digits) for _ in range(self.count)]
        return Problem(prompt=" ".join(map(str, numbers)) + "=", answer=" ".join(map(str, sorted(numbers))))


@part("task", "counting-down")
class CountingDown(Part):
    """A number to count down from by a step: "-7: 31 " -> "24 17 10 3"; long answers of easy steps."""

    least: int = integer(default=3, says="Fewest numbers of an answer.", minimum=1, maximum=10_000)
    most: int = integer(default=6, says="Most numbers of an answer.", minimum=1, maximum=10_000)
    largest_step: int = integer(default=9, says="The largest step; 2 is the smallest.", minimum=2, maximum=10**9)

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise InputError(f"task 'counting-down': least = {self.least} is above most = {self.most}")

    def problem(self, source: random.Random) -> Problem:
        step = source.randint(2, self.largest_step)
        start = step * source.randint(self.least, self.most) + source.randrange(step)
        return Problem(prompt=f"-{step}: {start} ", answer=" ".join(map(str, range(start - step, -1, -step))))


@part("task", "letter-counting")
class LetterCounting(Part):
    """How often a letter occurs in a word: "r in strawberry=" -> "3"."""

    length: int = integer(default=8, says="Length of the word.", minimum=1, maximum=100_000)
    letters: int = integer(default=4, says="How many different letters words are made of.", minimum=2)

    def problem(self, source: random.Random) -> Problem:
        alphabet = _LETTERS[: self.letters]
        word, letter = "".join(source.choice(alphabet) for _ in range(self.length)), source.choice(alphabet)
        return Problem(prompt=f"{letter} in {word}=", answer=str(word.count(letter)))


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


@part("task", "countdown")
class Countdown(Part):
    """Reach a target from given numbers, each used once: "3 5 2 -> 13=" -> "3*5-2" (any right expression counts).

    The answer is one right expression; `fields` hold the numbers and the target for the reward to check another one.
    """

    # All orders of the numbers are listed: 362,880 of nine.
    count: int = integer(default=3, says="How many numbers.", minimum=2, maximum=9)
    largest: int = integer(default=9, says="Largest number.", minimum=1)

    def problem(self, source: random.Random) -> Problem:
        numbers = [source.randint(1, self.largest) for _ in range(self.count)]
        order = source.choice(sorted(set(permutations(numbers))))
        value, expression = order[0], str(order[0])
        for number in order[1:]:
            sign = source.choice("+-*")
            # Evaluated from left to right; brackets keep that reading under the usual precedence.
            expression = (
                f"({expression}){sign}{number}" if sign == "*" and len(expression) > 1 else f"{expression}{sign}{number}"
            )
            value = _OPERATIONS[sign](value, number)
        prompt = f"{' '.join(map(str, numbers))} -> {value}="
        return Problem(prompt=prompt, answer=expression, fields={"numbers": numbers, "target": value})
