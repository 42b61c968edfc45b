"""An environment of two turns: the model answers, is told whether that was right, and may answer once more.

    legato train recipes/tiny.toml task.environment=examples/second_guess.py:SecondGuess reward.kind=environment \
        rollouts.max_response_tokens=32 algorithm=turn-gspo algorithm.advantage=turn-return

A right first answer earns 1 and ends the episode; a right second one earns 0.5. The reward of each turn reaches the
advantage of that turn. The recipe names another reward and shorter responses, hence these two options.
`tests/training/test_turns.py` trains the tiny model on it.
"""

from legato import Problem
from legato.core.rollout import StopReason
from legato.rollouts.episodes import Reply


class SecondGuess:
    """Two attempts at each problem, which must have an answer."""

    max_turns = 2
    deterministic = True

    def episode(self, problem: Problem) -> "Guesses":
        return Guesses(str(problem.answer).strip())


class Guesses:
    """One episode; its only state is the number of guesses."""

    def __init__(self, answer: str) -> None:
        self.answer, self.guesses = answer, 0

    def reply(self, text: str, stop: StopReason) -> Reply:
        self.guesses += 1
        guess = text.strip()
        if guess == self.answer:
            return Reply(content="right", reward=1.0 if self.guesses == 1 else 0.5, done=True)
        # Episodes whose first guess was the same are in the same state now: GiGPO compares their second guesses.
        return Reply(content="wrong, again:", reward=0.0, state=guess, done=self.guesses == SecondGuess.max_turns)
