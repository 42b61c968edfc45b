"""A guessing game: find a number in a few guesses; each wrong guess is answered with "more:" or "less:"."""

from legato.core.parts import Part, integer, part
from legato.core.rollout import Problem, StopReason
from legato.rollouts.episodes import Reply


@part("environment", "guess")
class GuessingGame(Part):
    """Guess the secret number of `task.kind = "secret-number"`. The reward is 1 for the turn that finds it."""

    guesses: int = integer(default=4, says="How many guesses an episode has.", minimum=1)
    deterministic = True

    @property
    def max_turns(self) -> int:
        return self.guesses

    def episode(self, problem: Problem) -> "Guessing":
        return Guessing(int(problem.answer or 0), int(problem.fields.get("largest", 9)))

    def demonstrate(self, problem: Problem) -> list[str]:
        """One guess: warm-up teaches the form of a guess and not how to search."""
        return [str(problem.answer)]


class Guessing:
    """An episode. Its state is the range in which the number still can be."""

    def __init__(self, secret: int, largest: int) -> None:
        self.secret, self.low, self.high = secret, 0, largest

    def reply(self, text: str, stop: StopReason) -> Reply:
        word = text.strip()
        guess = int(word) if word.isascii() and word.isdigit() and len(word) < 10 else None
        if guess is None:
            return Reply(content="a number:", reward=0.0, state=(self.low, self.high))
        if guess == self.secret:
            return Reply(reward=1.0, done=True)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return Reply(content="more:" if guess < self.secret else "less:", reward=0.0, state=(self.low, self.high))
