"""Recipes are part of the package: they are found from any directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from legato.config.load import load
from legato.config.read import RECIPES, find_recipe
from legato.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["recipes/tiny.toml", "tiny.toml", "tiny", "recipes/compare/tiny.toml", "compare/tiny"])
def test_a_recipe_is_found_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_recipe(Path(name))
    assert found.read_text() == (ROOT / "recipes" / ("compare" if "compare" in name else "") / "tiny.toml").read_text()


def test_a_file_that_is_here_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text("[training]\nsteps = 7\n")
    assert load([Path("tiny")]).config.training.steps == 7
    assert load([Path("recipes/tiny.toml")]).config.training.steps == 2200


def test_there_is_one_copy() -> None:
    assert RECIPES.resolve() == ROOT / "recipes"


@pytest.mark.parametrize("name", ["nothing", "recipes/nothing.toml", "recipes/../../config/read.py", "../recipes/tiny.toml"])
def test_what_is_no_recipe_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"does not exist; recipes in the package: .*tiny"):
        load([Path(name)])


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ([], "recipes/tiny.toml"),
        (["training.seed=3", "algorithm=grpo"], "recipes/tiny.toml"),
        (["policy.model=tiny-moe"], None),
        (["task.kind=reversal", "training.seed=3"], None),
    ],
)
def test_without_a_recipe_a_model_and_a_task_the_tiny_recipe_is_trained(
    words: list[str], recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from legato.cli import commands

    loaded, told = [], []

    def start(resolved: Any, given: Any, watcher: Any, notes: list[str]) -> None:
        loaded.append(resolved)
        told.extend(notes)

    monkeypatch.setattr(commands, "start", start)
    monkeypatch.setattr(commands, "for_terminal", lambda: None)
    monkeypatch.setattr(commands, "_print_ending", lambda run: None)
    with pytest.raises(AttributeError):  # no run, and so no exit code
        commands.train_command(words)
    assert loaded[0].config == load([] if recipe is None else [ROOT / recipe], words).config
    assert any("recipes/tiny.toml" in note for note in told) == (recipe is not None)


def test_a_recipe_without_stored_runs_is_marked_by_the_tool(tmp_path: Path) -> None:
    """From the stored results, not by hand: no recipe says it of itself."""
    runs = json.loads((ROOT / "src/legato/config/recipe_runs.json").read_text())
    assert set(runs) == {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    for name, entry in runs.items():
        assert all((ROOT / path).is_file() for path in entry["stored"])
        if "qwen3-0.6b" in name or "moe-long" in name:
            marked = [note for note in load([ROOT / name]).notes if name in note]
            assert bool(marked) is not bool(entry["stored"]), name
        assert "ever run" not in (ROOT / name).read_text()
    assert runs["recipes/tiny-moe-long.toml"]["stored"] and not runs["recipes/qwen3-0.6b-gsm8k.toml"]["stored"]
    mine = tmp_path / "mine.toml"
    mine.write_text((ROOT / "recipes/qwen3-0.6b-gsm8k.toml").read_text() + "\n# mine\n")
    assert not any("is stored" in note for note in load([mine]).notes)
