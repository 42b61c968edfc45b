"""The score that a data set of Reasoning Gym gives for an answer, in a process that can be killed."""

from importlib.util import find_spec

from legato.core.parts import Part, choice, integer, number, part
from legato.core.rollout import Rollout, Unscorable
from legato.errors import InputError
from legato.rewards.verifiers import Verdict
from legato.workers.pool import DiedError, RefusedError, TimedOutError, shared

WORKER = "legato.rewards.gym_worker:score"


@part("reward", "reasoning-gym")
class ReasoningGymScore(Part):
    """From 0 to 1, by the data set's own rule; some give a little for the right form."""

    extract: str = choice(
        "answer-tag",
        "whole",
        default="answer-tag",
        says="'answer-tag': what the last <answer>...</answer> holds, the whole response where there is none.",
    )
    seconds: float = number(
        default=10.0, says="How long one score may take; then it is unscorable.", above=0.0, maximum=600.0
    )
    longest: int = integer(default=20_000, says="An answer of more characters scores 0.", minimum=1, maximum=1_000_000)

    own_limit = True
    parallel = True

    def __post_init__(self) -> None:
        if find_spec("reasoning_gym") is None:
            raise InputError("reward 'reasoning-gym' needs the package reasoning-gym; pip install 'legato[gym]'")

    def __call__(self, rollout: Rollout) -> Verdict:
        fields = rollout.problem.fields
        if not {"dataset", "settings", "whole"} <= set(fields):
            return Unscorable("the problem is not of reasoning-gym; reward 'reasoning-gym' goes with task 'reasoning-gym'")
        answer = tagged_answer(rollout.text) if self.extract == "answer-tag" else rollout.text.strip()
        if len(answer) > self.longest:
            return 0.0
        try:
            score: float = shared(WORKER).ask(
                fields["dataset"], dict(fields["settings"]), fields["whole"], answer, seconds=self.seconds
            )
        except TimedOutError:
            return Unscorable(f"timed out after {self.seconds:g} s")
        except (DiedError, RefusedError) as error:
            return Unscorable(str(error))
        return score


def tagged_answer(text: str) -> str:
    """The content of the last <answer>...</answer>; the whole text if there is none."""
    before, end, _ = text.rpartition("</answer>")
    _, start, answer = before.rpartition("<answer>")
    return (answer if end and start else text).strip()
