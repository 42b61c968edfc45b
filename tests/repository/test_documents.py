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


def test_the_example_of_the_readme_runs_in_twelve_lines() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    assert len([line for line in example[1].splitlines() if line.strip()]) <= 12
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(example[1], names)
    assert torch.isfinite(names["logits"].grad).all()
