"""Mathematical equality of a response and the answer, by Math-Verify, in a process that can be killed.

Some expressions keep sympy busy for ever (towers of powers, factorials of factorials). Such a response is unscorable, not
wrong: the same happens to right answers on a slow machine.
"""

from importlib.util import find_spec

from legato.core.boxed import last_boxed
from legato.core.parts import Part, integer, number, part
from legato.core.rollout import Rollout, Unscorable
from legato.errors import InputError
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
