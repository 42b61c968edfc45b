"""Published evaluation sets: read in the columns of the hub, from JSON Lines, Parquet and by name."""

from pathlib import Path
from typing import Any

import pytest

from legato.config.kinds import make, usual_evaluation
from legato.errors import InputError
from legato.tasks.data import INSTRUCTION
from tests.proof.published import OTHER_COLUMNS, ROWS, write_rows

ANSWERS = {
    "gsm8k": ["5", "1234"],
    "math-500": ["1", r"\frac{1}{2}"],
    "aime-24": ["033", "204"],
    "aime-25": ["70", "588"],
    "aime-26": ["277", "62"],
    "amc-23": ["27.0", "36.0"],
    "minerva": ["0.75", "1e4"],
    "olympiad": ["2", "1, 2.5"],
}


def load_set(name: str, **options: Any) -> Any:
    usual = usual_evaluation(name)
    assert usual is not None
    return make("task", name, {**usual.options, **options}).load()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_a_set_is_read_in_its_published_columns(name: str, ending: str, tmp_path: Path) -> None:
    problems = load_set(name, path=str(write_rows(tmp_path / f"a.{ending}", ROWS[name])))
    assert [problem.answer for problem in problems] == ANSWERS[name]
    assert all(problem.prompt.endswith(f"\n{INSTRUCTION}") for problem in problems)


@pytest.mark.parametrize(("name", "row", "answer"), OTHER_COLUMNS)
def test_other_copies_of_a_set_are_read_too(name: str, row: dict[str, Any], answer: str, tmp_path: Path) -> None:
    [problem] = load_set(name, path=str(write_rows(tmp_path / "a.jsonl", [row])), instruction=False)
    assert (problem.prompt, problem.answer) == ("p", answer)


def test_a_problem_of_olympiadbench_has_its_context_and_its_tolerance(tmp_path: Path) -> None:
    first, second = load_set("olympiad", path=str(write_rows(tmp_path / "a.jsonl", ROWS["olympiad"])), instruction=False)
    assert (first.prompt, first.fields["tolerance"]) == ("1+1=", 0.0)
    assert (second.prompt, second.fields["tolerance"]) == ("Let x be a root.\nWhat is x?", 0.01)


def test_the_hub_is_asked_for_the_published_data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    calls: list[Any] = []

    def load_dataset(name: str, config: str | None, split: str, **options: Any) -> Any:
        calls.append((name, config, split))
        return datasets.Dataset.from_list(ROWS[asked])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for asked in ROWS:
        assert [problem.answer for problem in load_set(asked)] == ANSWERS[asked]
    assert calls == [
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("HuggingFaceH4/aime_2024", None, "train"),
        ("math-ai/aime25", None, "test"),
        ("math-ai/aime26", None, "test"),
        ("math-ai/amc23", None, "test"),
        ("math-ai/minervamath", None, "test"),
        ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
    ]


@pytest.mark.parametrize("name", ROWS)
def test_without_the_hub_the_message_says_which_file_to_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", no_network)
    with pytest.raises(
        InputError, match=r"no route; or give a file \(.jsonl or .parquet\) with the columns .*set task.path=FILE"
    ):
        load_set(name)


def test_a_file_with_other_columns_is_refused_with_those_that_are_expected(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": "p", "target": "1"}])
    with pytest.raises(InputError, match=r"line 1: expected the columns problem or question, and answer or solution, got"):
        load_set("aime-24", path=str(file))
