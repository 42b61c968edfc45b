"""An environment with tools: the model may ask for letters of a hidden word, then says how many vowels it has.

    legato train recipes/smollm2.toml task.kind=examples/word_tools.py:Words task.environment=examples/word_tools.py:Vowels \
        reward.kind=environment algorithm=gspo-token algorithm.advantage=turn-return

A public method with type hints is a tool; its docstring tells the model what it does. `tests/examples/test_own.py` plays it.
"""

import random

from legato import Problem
from legato.environments.tools import ToolEnvironment, ToolEpisode
from legato.rollouts.episodes import Reply

WORDS = ("audio", "rhythm", "banana", "queue", "string", "area", "lynx", "opera")


class Words:
    """Draws the problems."""

    def problem(self, random: random.Random) -> Problem:
        word = random.choice(WORDS)
        prompt = f"How many vowels (a, e, i, o, u) has word {random.randrange(1000)}? Use the tool. Answer with a number."
        return Problem(prompt=prompt, answer=str(sum(letter in "aeiou" for letter in word)), fields={"word": word})


class Asking(ToolEpisode):
    """One hidden word."""

    def letter(self, place: int) -> str:
        """Return one letter of the word.

        Args:
            place: 0 for the first letter.
        """
        return self.problem.fields["word"][place]

    def finish(self, text: str) -> Reply:
        return Reply(reward=float(text.strip() == self.problem.answer), done=True)


class Vowels(ToolEnvironment):
    """At most 12 turns, calls included."""

    max_turns = 12
    episodes = Asking
