"""Mathematical equality of a response and the answer, by Math-Verify, in a process that can be killed.

Some expressions keep sympy busy for ever (towers of powers, factorials of factorials). Such a response is unscorable, not
wrong: the same happens to right answers on a slow machine.
"""

from fractions import Fraction
from importlib.util import find_spec
from typing import Any

from legato.core.boxed import last_boxed
from legato.core.parts import Part, flag, integer, number, part
from legato.core.rollout import Rollout, Unscorable
from legato.errors import InputError
from legato.rewards.answers import bracket_arguments, exact_value, find_answer, items, last_number, normal_form
from legato.rewards.verifiers import Verdict
from legato.workers.pool import DiedError, RefusedError, TimedOutError, shared

WORKER = "legato.rewards.math_worker:compare"


@part("reward", "math-verify")
class MathVerify(Part):
    r"""1 if the response means the answer: 0.5, 1/2 and \frac{1}{2} are one; 0 if not, or if it holds no mathematics."""

    seconds: float = number(
        default=5.0, says="How long one comparison may take; then it is unscorable.", above=0.0, maximum=600.0
    )
    longest: int = integer(
        default=4096, says="How many characters of a response are read, counted from its end.", minimum=1, maximum=100_000
    )

    own_limit = True
    parallel = True
    needs_answer = True

    def __post_init__(self) -> None:
        if find_spec("math_verify") is None:
            raise InputError("reward 'math-verify' needs the package math-verify; pip install 'legato[math]'")

    def __call__(self, rollout: Rollout) -> Verdict:
        if rollout.problem.answer is None:
            return Unscorable("the problem has no answer")
        response, answer = rollout.text.strip(), rollout.problem.answer.strip()
        if not answer:
            return Unscorable("the answer is empty")
        # Compare before parsing: sympy may take very long to find a long answer equal to itself.
        if response == answer or last_boxed(response) == answer:
            return 1.0
        if len(answer) > self.longest:
            return Unscorable(f"the answer has {len(answer)} characters; longest = {self.longest} is allowed")
        if not response:
            return 0.0
        try:
            verdict = shared(WORKER).ask(answer, response[-self.longest :], seconds=self.seconds)
        except TimedOutError:
            return Unscorable(f"timed out after {self.seconds:g} s")
        except (DiedError, RefusedError) as error:
            return Unscorable(str(error))
        if verdict == "gold":
            return Unscorable(f"the answer {answer[:40]!r} cannot be read as mathematics")
        return float(verdict == "right")


@part("reward", "math-answer")
class MathAnswer(Part):
    r"""1 if the final answer of the response (\boxed{...}, "#### 42", "the answer is 42") is the problem's; else 0.

    Answers are compared as text in a normal form, then as exact numbers, then by Math-Verify where it is installed.
    """

    last_number: bool = flag(
        default=False,
        says="Whether the last number of a finished response counts as its answer where it states none.",
    )
    relative_tolerance: float = number(
        default=0.0, says="Largest difference of numbers, as a share of the answer, that still counts as equal.", minimum=0.0
    )
    seconds: float = number(
        default=5.0,
        says="How long Math-Verify may take for one comparison; then it is unscorable.",
        above=0.0,
        maximum=600.0,
    )

    own_limit = True
    parallel = True
    needs_answer = True

    def __call__(self, rollout: Rollout) -> Verdict:
        right = rollout.problem.answer
        if right is None:
            return Unscorable("the problem has no answer")
        answer = find_answer(rollout.text)
        if answer is None and self.last_number and not rollout.stop.truncated:
            answer = last_number(rollout.text)
        if answer is None:
            return 0.0
        verdict = self._compare(normal_form(right), normal_form(answer), rollout.problem.fields.get("tolerance"))
        if verdict is not None:
            return float(verdict)
        if find_spec("math_verify") is None or len(answer) > _LONGEST_ANSWER:
            return 0.0
        try:
            right, answer = bracket_arguments(right), bracket_arguments(answer)
            return float(shared(WORKER).ask(right, rf"\boxed{{{answer}}}", seconds=self.seconds) == "right")
        except TimedOutError:
            return Unscorable(f"timed out after {self.seconds:g} s")
        except (DiedError, RefusedError) as error:
            return Unscorable(str(error))

    def _compare(self, right: str, answer: str, tolerance: Any) -> bool | None:
        """Whether two answers in normal form are equal; None if neither text nor numbers decide."""
        if right.lower() == answer.lower():
            return True
        values = exact_value(right), exact_value(answer)
        if values[0] is not None and values[1] is not None:
            margin = max(abs(values[0]) * Fraction(self.relative_tolerance), Fraction(tolerance or 0))
            return abs(values[0] - values[1]) <= margin
        several = items(right), items(answer)
        if len(several[0]) > 1 and len(several[0]) == len(several[1]):
            # A list without brackets has no order. Members that only Math-Verify can compare leave the list to it.
            rest = list(several[1])
            for each in several[0]:
                equal = next((other for other in rest if self._compare(each, other, tolerance)), None)
                if equal is None:
                    return None
                rest.remove(equal)
            return True
        return None


_LONGEST_ANSWER = 4096
"""In characters; Math-Verify is not asked about a longer answer."""
