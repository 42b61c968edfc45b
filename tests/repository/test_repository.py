"""What the repository promises about itself."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_every_source_file_says_what_it_is() -> None:
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_only_training_knows_of_ranks_and_nobody_of_pickles() -> None:
    """import-linter cannot name a sub-package of torch."""
    for path in SOURCES:
        assert not re.search(r"import pickle|torch\.load|torch\.save", path.read_text()), path
        starts = path.name == "processes.py"  # --processes starts torchrun
        assert starts or "training" in path.parts or "torch.distributed" not in path.read_text(), path


def test_architecture_is_under_150_lines() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 150


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", ".ci/run"])
def test_the_usual_files_of_a_repository_exist(name: str) -> None:
    assert (ROOT / name).read_text().strip()


def test_links_in_the_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
