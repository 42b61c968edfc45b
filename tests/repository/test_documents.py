"""Generated pages are current, and the example of the README runs."""

import re
from pathlib import Path

import pytest
import torch

from docs.generate import pages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(pages()))
def test_the_generated_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text() == pages()[path], f"{path} is out of date: run make docs"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_every_example_of_the_readme_has_at_most_twelve_lines() -> None:
    assert len(examples()) == 3
    for example in examples():
        assert len([line for line in example.splitlines() if line.strip()]) <= 12


def test_the_readme_and_the_recipe_promise_the_same_time() -> None:
    command = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("make train"))
    machine = next(line for line in (ROOT / "recipes/tiny.toml").read_text().splitlines() if line.startswith("# Machine:"))
    promised = machine.rpartition(", ")[2].rstrip(".")
    assert promised.endswith("minutes") and f"in {promised};" in command


def test_the_loss_example_of_the_readme_runs() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(examples()[1], names)
    assert torch.isfinite(names["logits"].grad).all()
    exec(examples()[2], names)
    assert names["state"]["auto-clip"]["updates"] == 3


def test_the_training_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(examples()[0], names)
    run = names["run"]
    assert 0 <= run.accuracy <= 1
    assert (run.model_folder / "config.json").is_file()
    assert (run.directory / "report.html").is_file()
