r"""Problems from data: files of yours, data sets by name, and the two formats everybody has, GSM8K and MATH.

    Jsonl(path="mine.jsonl", prompt="question").load()  ->  [Problem(prompt=..., answer=..., fields={other columns}), ...]

A prompt column holds text or chat messages. Of equal prompts the first is kept; `read()` tells how many were dropped.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from legato.core.boxed import last_boxed
from legato.core.parts import Part, choice, part, text
from legato.core.rollout import Message, Problem
from legato.errors import InputError
from legato.tasks.rows import JSON_LINES, PARQUET, Row, dataset_rows, read_rows, split_files

ROLES = ("system", "user", "assistant", "tool")

_PROMPT = "The column of the prompt: text, or a list of messages with role and content."
_ANSWER = "The column of the answer; where there is no column of the default name, problems have no answer."
_SYSTEM = "A system message before every prompt, which then is messages."
_SPLIT_PATH = "A file, or a folder with a file for each split; None: by the name of the data set."


INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
"""What evaluations of mathematics usually ask for, on a line of its own after the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """How a data set is usually evaluated: the defaults of a set in `evaluation.sets`."""

    samples: int
    reward: str = "math-answer"
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task that are other than in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Loaded problems without duplicate prompts."""

    problems: list[Problem]
    duplicates: int
    """How many rows were dropped because their prompt was a duplicate."""


@part("data", "jsonl")
class Jsonl(Part):
    """Problems from a JSON Lines file (.jsonl or .jsonl.gz): an object a line."""

    path: str = text(says="The file.")
    prompt: str = text(default="prompt", says=_PROMPT)
    answer: str | None = text(default="answer", says=_ANSWER, optional=True)
    system_prompt: str | None = text(default=None, says=_SYSTEM, optional=True)

    def read(self) -> Loaded:
        rows = read_rows(Path(self.path), JSON_LINES)
        return collect(make_problems(rows, self.prompt, self.answer, self.system_prompt), self.path)

    def load(self) -> list[Problem]:
        return self.read().problems


@part("data", "parquet")
class Parquet(Part):
    """Problems from a Parquet file."""

    path: str = text(says="The file.")
    prompt: str = text(default="prompt", says=_PROMPT)
    answer: str | None = text(default="answer", says=_ANSWER, optional=True)
    system_prompt: str | None = text(default=None, says=_SYSTEM, optional=True)

    def read(self) -> Loaded:
        rows = read_rows(Path(self.path), PARQUET)
        return collect(make_problems(rows, self.prompt, self.answer, self.system_prompt), self.path)

    def load(self) -> list[Problem]:
        return self.read().problems


@part("data", "dataset")
class NamedDataset(Part):
    """Problems from a data set on the Hugging Face hub. A data set that needs a loading script is refused."""

    dataset: str = text(says="Its name, as 'openai/gsm8k'.")
    config: str | None = text(default=None, says="Its configuration, where it has several.", optional=True)
    split: str = text(default="train", says="Which split.")
    prompt: str = text(default="prompt", says=_PROMPT)
    answer: str | None = text(default="answer", says=_ANSWER, optional=True)
    system_prompt: str | None = text(default=None, says=_SYSTEM, optional=True)

    def read(self) -> Loaded:
        rows = dataset_rows(self.dataset, self.config, self.split)
        return collect(make_problems(rows, self.prompt, self.answer, self.system_prompt), f"data set {self.dataset!r}")

    def load(self) -> list[Problem]:
        return self.read().problems


@part("data", "gsm8k")
class Gsm8k(Part):
    """Grade-school word problems (question, answer): the answer is what follows the last ####, without thousands commas."""

    path: str | None = text(default=None, says=_SPLIT_PATH, optional=True)
    dataset: str = text(default="openai/gsm8k", says="The name of the data set, where no path is given.")
    config: str | None = text(default="main", says="Its configuration.", optional=True)
    split: str = choice("train", "test", default="train", says="Which split.")
    instruction: str | None = text(default=None, says="A line after every question.", optional=True)
    system_prompt: str | None = text(default=None, says=_SYSTEM, optional=True)

    usual: ClassVar = Usual(
        samples=1, reward_options={"last_number": True}, options={"split": "test", "instruction": INSTRUCTION}
    )

    def read(self) -> Loaded:
        rows = _with_extracted_answer(
            with_instruction(self._published_rows(), "question", self.instruction), "answer", _answer_after_hashes
        )
        return collect(make_problems(rows, "question", EXTRACTED, self.system_prompt), self.path or self.dataset)

    def _published_rows(self) -> Iterator[Row]:
        return split_rows(self.path, self.dataset, self.config, self.split, "question and answer")

    def load(self) -> list[Problem]:
        return self.read().problems


@part("data", "math")
class CompetitionMath(Part):
    r"""Competition problems (problem, solution, level, type): the answer is what the solution's last \boxed{...} holds."""

    path: str | None = text(default=None, says=_SPLIT_PATH, optional=True)
    dataset: str = text(
        default="DigitalLearningGmbH/MATH-lighteval", says="The name of the data set, where no path is given."
    )
    config: str | None = text(default=None, says="Its configuration.", optional=True)
    split: str = choice("train", "test", default="train", says="Which split.")
    system_prompt: str | None = text(default=None, says=_SYSTEM, optional=True)

    usual: ClassVar = Usual(samples=1, options={"split": "test"})

    def read(self) -> Loaded:
        published = split_rows(self.path, self.dataset, self.config, self.split, "problem and solution")
        rows = _with_extracted_answer(published, "solution", boxed_answer)
        return collect(make_problems(rows, "problem", EXTRACTED, self.system_prompt), self.path or self.dataset)

    def load(self) -> list[Problem]:
        return self.read().problems


def collect(problems: Iterable[Problem], source: str) -> Loaded:
    """All problems with distinct prompts. Of equal prompts the first is kept."""
    by_prompt: dict[str, Problem] = {}
    count = 0
    for problem in problems:
        count += 1
        by_prompt.setdefault(problem.key, problem)
    if not by_prompt:
        raise InputError(f"{source}: holds no problems")
    return Loaded(problems=list(by_prompt.values()), duplicates=count - len(by_prompt))


def split_rows(path: str | None, dataset: str, config: str | None, split: str, columns: str) -> Iterator[Row]:
    """The rows of one split, from a file or folder, or by the name of the data set. `columns` are those of such a file."""
    if path is None:
        try:
            yield from dataset_rows(dataset, config, split)
        except InputError as error:
            raise InputError(
                f"{error}; or give a file (.jsonl or .parquet) with the columns {columns}: set task.path=FILE"
            ) from None
        return
    for file in split_files(Path(path), split):
        yield from read_rows(file)


def with_instruction(rows: Iterable[Row], column: str, instruction: str | None) -> Iterator[Row]:
    """Rows with a line added to their question."""
    for where, row in rows:
        if instruction is None:
            yield where, row
        else:
            question = _text(cell(row, column, where), column, where)
            yield where, {**row, column: f"{question}\n{instruction}"}


EXTRACTED = "answer"
"""The column that `_with_extracted_answer` adds."""


def _with_extracted_answer(rows: Iterable[Row], column: str, extract: Callable[[str, str], str]) -> Iterator[Row]:
    """Rows of worked solutions with the extracted answer added; the full solution stays as `solution`."""
    for where, row in rows:
        solution = _text(cell(row, column, where), column, where)
        yield where, {**row, "solution": solution, EXTRACTED: extract(solution, where)}


def _answer_after_hashes(solution: str, where: str) -> str:
    _, marker, answer = solution.rpartition("####")
    if not marker or not answer.strip():
        raise InputError(f"{where}: the answer {solution[-40:]!r} has no '#### ' with the result after it")
    return answer.strip().replace(",", "")


def boxed_answer(solution: str, where: str) -> str:
    """What the last box of a worked solution holds."""
    answer = last_boxed(solution)
    if answer is None:
        raise InputError(rf"{where}: the solution ends {solution[-40:]!r} and has no \boxed{{...}} with the answer")
    return answer


def make_problems(rows: Iterable[Row], prompt: str, answer: str | None, system_prompt: str | None) -> Iterator[Problem]:
    """The problem of each row; the other columns are its fields."""
    without: Row | None = None
    for number, (where, row) in enumerate(rows):
        question = _prompt(cell(row, prompt, where, "prompt"), prompt, where)
        if system_prompt is not None:
            question = _with_system(question, system_prompt, where)
        if number == 0 and answer == _DEFAULT_ANSWER and answer not in row:
            answer, without = None, (where, row)  # data without answers, for a reward that reads none
        if without is not None and _DEFAULT_ANSWER in row:
            cell(without[1], _DEFAULT_ANSWER, without[0], "answer")  # raises: other rows do have answers
        solution = None if answer is None else answer_text(cell(row, answer, where, "answer"), answer, where)
        # A reward of TRL gets every column by its own name and as it is: a number stays a number.
        plain = answer == "answer" and isinstance(row[answer], str)
        fields = {name: value for name, value in row.items() if name != prompt and not (plain and name == answer)}
        yield Problem(prompt=question, answer=solution, fields=fields)


_DEFAULT_ANSWER = "answer"
_USUAL_COLUMNS = {
    "prompt": ("question", "problem", "messages", "input", "query", "instruction", "text"),
    "answer": ("solution", "final_answer", "output", "target", "label", "ground_truth", "response"),
}
"""Names that data sets use for the column that an option names."""


def cell(row: Mapping[str, Any], column: str, where: str, option: str | None = None) -> Any:
    """The value in a column; InputError if there is none. `option` of the task names the column, where one does."""
    if column not in row:
        advice = ""
        if option is not None and row:
            likely = [name for name in row if name.lower() in _USUAL_COLUMNS[option]]
            likely += get_close_matches(column, [name for name in row if name not in likely], n=1)
            advice = f"; set task.{option}={likely[0]}" if likely else f"; set task.{option} to one of them"
            advice += ", or task.answer=false if there are no answers" if option == "answer" and not likely else ""
        raise InputError(f"{where}: expected a column {column!r}, got {', '.join(map(repr, row)) or 'none'}{advice}")
    return row[column]


def _text(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: expected text in {column!r}, got {_describe(value)}")
    if not value.strip():
        raise InputError(f"{where}: {column!r} is empty")
    _check_characters(value, column, where)
    return value


def _check_characters(value: str, column: str, where: str) -> None:
    # JSON can contain \u0000 and half of a surrogate pair, which no file and no tokenizer accepts.
    if "\0" in value:
        raise InputError(f"{where}: {column!r} holds a NUL character")
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise InputError(f"{where}: {column!r} holds half of a surrogate pair, which is no character")


def answer_text(value: Any, column: str, where: str) -> str:
    """An answer as text; data sets also store numbers."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise InputError(f"{where}: expected text or a finite number in {column!r}, got {_describe(value)}")
    return _text(value, column, where)


def _describe(value: Any) -> str:
    return "null" if value is None else f"{value!r}"[:40] if isinstance(value, int | float) else f"a {type(value).__name__}"


def _prompt(value: Any, column: str, where: str) -> str | list[Message]:
    if not isinstance(value, list):
        return _text(value, column, where)
    if not value:
        raise InputError(f"{where}: {column!r} is an empty list of messages")
    return [_message(item, f"{column}[{place}]", where) for place, item in enumerate(value)]


def _message(item: Any, column: str, where: str) -> Message:
    if not isinstance(item, dict):
        raise InputError(f"{where}: expected a message with role and content in {column!r}, got {_describe(item)}")
    # Parquet gives every message the keys of all messages; missing values are None.
    message = {name: value for name, value in item.items() if value is not None}
    other = sorted(set(message) - {"role", "content"})
    if other:
        raise InputError(f"{where}: expected only role and content in {column!r}, got {other[0]!r}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InputError(f"{where}: expected one of {', '.join(ROLES)} as role in {column!r}, got {role!r}")
    return {"role": role, "content": _text(content, f"{column}.content", where)}


def _with_system(prompt: str | Sequence[Message], system_prompt: str, where: str) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[0]["role"] == "system":
        raise InputError(f"{where}: the prompt already has a system message; leave system_prompt out")
    return [{"role": "system", "content": system_prompt}, *messages]
