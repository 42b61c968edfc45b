r"""Evaluation sets by name, in the columns in which they are published: MATH-500, AIME, AMC, Minerva, OlympiadBench.

    Aime24().load()                         ->  30 problems from the Hugging Face hub
    Aime24(path="aime24.jsonl").load()      ->  the same from a file with the columns problem and answer

GSM8K is in `data.py`, since it is a task to train on too. A set is published under several names with slightly other
columns; a loader reads all of them.
"""

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from legato.core.boxed import last_boxed
from legato.core.parts import Part, part, text
from legato.errors import InputError
from legato.tasks.data import (
    EXTRACTED,
    INSTRUCTION,
    Loaded,
    Usual,
    answer_text,
    boxed_answer,
    collect,
    make_problems,
    split_rows,
    with_instruction,
)
from legato.tasks.rows import Row

_QUESTION = "question"
"""The column that every loader writes the problem to."""
_DATASET = "The name of the data set, where no path is given."
_CONFIG = "Its configuration, where it has several."
_SPLIT = "Which split."


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Part):
    """A published evaluation set."""

    path: str | None = text(
        default=None,
        says="A .jsonl or .parquet file, or a folder with a file for the split; absent: by the name of the data set.",
        optional=True,
    )
    dataset: str = text(default="", says=_DATASET)
    config: str | None = text(default=None, says=_CONFIG, optional=True)
    split: str = text(default="test", says=_SPLIT)
    instruction: str | None = text(default=INSTRUCTION, says="A line after every problem.", optional=True)

    usual: ClassVar[Usual]
    questions: ClassVar[tuple[str, ...]] = ("problem", "question")
    """Columns that may hold the problem; the first that is there does."""
    answers: ClassVar[tuple[str, ...]] = ("answer",)
    """Columns that may hold the answer."""
    solutions: ClassVar[tuple[str, ...]] = ("solution",)
    r"""Columns whose last \boxed{...} is the answer, if there is no column of answers."""

    def read(self) -> Loaded:
        rows = with_instruction(self._rows(), _QUESTION, self.instruction)
        return collect(make_problems(rows, _QUESTION, EXTRACTED, None), self.path or self.dataset)

    def load(self) -> Any:
        return self.read().problems

    def _rows(self) -> Iterator[Row]:
        for where, row in split_rows(self.path, self.dataset, self.config, self.split, self._columns):
            columns = {name.lower(): name for name in row}
            question = _first(columns, self.questions)
            answer, solution = _first(columns, self.answers), _first(columns, self.solutions)
            if question is None or (answer is None and solution is None):
                raise InputError(
                    f"{where}: expected the columns {self._columns}, got {', '.join(map(repr, row)) or 'none'};"
                    " read such a file with task = {kind = 'jsonl', prompt = ..., answer = ...}"
                )
            if answer is not None:
                right = self.answer(row[answer], answer, where)
            else:
                assert solution is not None
                right = boxed_answer(str(row[solution]), where)
            rest = {name: value for name, value in row.items() if name not in (question, answer)}
            yield where, {**rest, **self.fields(row), _QUESTION: self.question(row[question], row), EXTRACTED: right}

    @property
    def _columns(self) -> str:
        return f"{' or '.join(self.questions)}, and {' or '.join((*self.answers, *self.solutions))}"

    def answer(self, value: Any, column: str, where: str) -> str:
        """The answer that a column holds."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # tables of numbers with a gap store whole numbers as 27.0
        plain = answer_text(value, column, where).strip()
        return last_boxed(plain) or plain

    def question(self, value: Any, row: Mapping[str, Any]) -> Any:
        """The text of a problem."""
        return value

    def fields(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Further fields of a problem, made of its columns."""
        return {}


def _first(columns: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((columns[name] for name in names if name in columns), None)


@part("data", "math-500")
class Math500(Benchmark):
    """MATH-500: 500 problems of the test split of MATH (problem, solution, answer, subject, level, unique_id)."""

    dataset: str = text(default="HuggingFaceH4/MATH-500", says=_DATASET)

    usual: ClassVar = Usual(samples=4)


@part("data", "aime-24")
class Aime24(Benchmark):
    """AIME 2024, I and II: 30 problems with answers from 0 to 999 (id, problem, solution, answer, url, year)."""

    dataset: str = text(default="HuggingFaceH4/aime_2024", says=_DATASET)
    split: str = text(default="train", says=_SPLIT)

    usual: ClassVar = Usual(samples=16)


@part("data", "aime-25")
class Aime25(Benchmark):
    """AIME 2025, I and II: 30 problems (problem, answer, id)."""

    dataset: str = text(default="math-ai/aime25", says=_DATASET)

    usual: ClassVar = Usual(samples=16)


@part("data", "aime-26")
class Aime26(Benchmark):
    """AIME 2026, I and II: 30 problems (problem, answer, id; MathArena publishes problem_idx, problem, answer)."""

    dataset: str = text(default="math-ai/aime26", says=_DATASET)

    usual: ClassVar = Usual(samples=16)


@part("data", "amc-23")
class Amc23(Benchmark):
    """AMC 12 of 2023: 40 problems with whole numbers as answers (id, question, answer, url)."""

    dataset: str = text(default="math-ai/amc23", says=_DATASET)

    usual: ClassVar = Usual(samples=16)


@part("data", "minerva")
class Minerva(Benchmark):
    """Minerva Math: 272 problems of undergraduate science (question, answer; also problem, solution)."""

    dataset: str = text(default="math-ai/minervamath", says=_DATASET)

    usual: ClassVar = Usual(samples=4)


@part("data", "olympiad")
class Olympiad(Benchmark):
    """OlympiadBench: 674 open problems of mathematics in English, text only (question, final_answer, context, error)."""

    dataset: str = text(default="Hothan/OlympiadBench", says=_DATASET)
    config: str | None = text(default="OE_TO_maths_en_COMP", says=_CONFIG, optional=True)
    split: str = text(default="train", says=_SPLIT)

    usual: ClassVar = Usual(samples=4)
    questions: ClassVar = ("question", "problem")
    answers: ClassVar = ("final_answer", "answer")

    def answer(self, value: Any, column: str, where: str) -> str:
        """The members of `final_answer`, a list (or its text in some copies), without the dollars around each."""
        if isinstance(value, str) and value.startswith("["):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                value = ast.literal_eval(value)
        members = value if isinstance(value, list | tuple) and value else [value]
        return ", ".join(_without_dollars(answer_text(each, column, where)) for each in members)

    def question(self, value: Any, row: Mapping[str, Any]) -> Any:
        """The question after its context, which some problems share."""
        context = row.get("context")
        return f"{context}\n{value}" if isinstance(context, str) and context.strip() and isinstance(value, str) else value

    def fields(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The error that a numeric answer may have, where the row has one."""
        try:
            return {"tolerance": float(row.get("error") or 0.0)}
        except (TypeError, ValueError):
            return {}  # several answers, each with its own error


def _without_dollars(answer: str) -> str:
    plain = answer.strip()
    return plain.strip("$").strip() if plain.count("$") == 2 and plain[0] == plain[-1] == "$" else plain
