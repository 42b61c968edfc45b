"""The recipes shown in docs/data.md and docs/evaluation.md load, and the lines of data are read as the pages say."""

import json
import re
from pathlib import Path

import pytest

from legato.config.load import load
from legato.tasks.data import Jsonl

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    pages = [(ROOT / "docs" / name).read_text() for name in ("data.md", "evaluation.md")]
    return [block for page in pages for block in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


@pytest.mark.parametrize("text", blocks("toml"))
def test_a_recipe_of_the_pages_loads(text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text(text)
    resolved = load([recipe])
    assert resolved.config.task.kind == "jsonl" or list(resolved.config.evaluation.sets) == ["aime-24", "mine"]


def test_the_lines_of_data_are_problems(tmp_path: Path) -> None:
    first, second = blocks("json")
    (tmp_path / "a.jsonl").write_text(first)
    [problem] = Jsonl(path=str(tmp_path / "a.jsonl"), prompt="question", answer="result").load()
    assert (problem.prompt, problem.answer, problem.fields) == ("4+9=", "13", {"result": 13, "off_by": 1})
    assert json.loads(first) in map(json.loads, (ROOT / "examples/additions.jsonl").read_text().splitlines())
    (tmp_path / "b.jsonl").write_text(second)
    assert Jsonl(path=str(tmp_path / "b.jsonl")).load()[0].prompt[1]["content"] == "6+6?"
