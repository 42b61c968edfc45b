"""Question answering with a search over local documents: the policy may call `search`, then says the answer."""

import math
import re
from collections import Counter
from pathlib import Path

from legato.core.parts import Part, integer, part, text
from legato.core.rollout import Problem
from legato.environments.tools import ToolEpisode, schema_of
from legato.errors import InputError
from legato.rollouts.episodes import Reply

_WORD = re.compile(r"\w+")


@part("environment", "search")
class SearchQuestions(Part):
    """Answer questions with a tool that searches documents: a problem's own (`task.kind = "facts"`), or text files."""

    documents: str | None = text(
        default=None, says="A folder of .txt files whose paragraphs are searched; absent: the problem's own.", optional=True
    )
    passages: int = integer(default=1, says="How many passages a search returns.", minimum=1, maximum=20)
    turns: int = integer(default=4, says="The most turns of an episode, searches included.", minimum=1)
    deterministic = True

    @property
    def max_turns(self) -> int:
        return self.turns

    @property
    def tools(self) -> list[dict[str, object]]:
        return [schema_of(Question.search)]

    def episode(self, problem: Problem) -> "Question":
        own = problem.fields.get("documents", ()) if self.documents is None else read_passages(self.documents)
        return Question(problem, list(own), self.passages)

    def demonstrate(self, problem: Problem) -> list[str]:
        """Every third problem with a search, the others by guess: what is worth more is left to training."""
        name = str(problem.prompt).strip().rstrip("?").rpartition(" ")[2]
        return [f"search({name})", str(problem.answer)] if int(problem.key, 16) % 3 == 0 else [str(problem.answer)]


def read_passages(folder: str) -> list[str]:
    """The paragraphs of the text files of a folder; InputError if there are none."""
    files = sorted(Path(folder).glob("**/*.txt"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    passages = [part.strip() for whole in texts for part in whole.split("\n\n") if part.strip()]
    if not passages:
        raise InputError(f"expected a folder with .txt files, got none in {folder!r} (task.environment_options.documents)")
    return passages


class Question(ToolEpisode):
    """One question."""

    def __init__(self, problem: Problem, documents: list[str], passages: int) -> None:
        super().__init__(problem)
        self._documents, self._passages = documents, passages

    def search(self, query: str) -> str:
        """Search the documents for words.

        Args:
            query: The words.
        """
        best = rank(query, self._documents)[: self._passages]
        return "\n".join(best) or "nothing."

    def after_calls(self, results: object) -> Reply:
        return Reply(reward=0.0)

    def finish(self, text: str) -> Reply:
        return Reply(reward=float(text.strip().lower() == str(self.problem.answer).strip().lower()), done=True)


def rank(query: str, documents: list[str]) -> list[str]:
    """The documents that share words with the query, best first (BM25)."""
    bags = [Counter(_WORD.findall(document.lower())) for document in documents]
    mean = sum(map(Counter.total, bags)) / max(1, len(bags))
    scores = [0.0] * len(documents)
    for word in set(_WORD.findall(query.lower())):
        having = sum(word in bag for bag in bags)
        rarity = math.log(1 + (len(bags) - having + 0.5) / (having + 0.5))
        for place, bag in enumerate(bags):
            often = bag[word]
            scores[place] += rarity * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * bag.total() / max(1.0, mean)))
    order = sorted(range(len(documents)), key=lambda place: -scores[place])
    return [documents[place] for place in order if scores[place] > 0]
