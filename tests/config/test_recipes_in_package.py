"""Recipes are part of the package: they are found from any directory."""

from pathlib import Path

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


def test_bare_train_is_the_tiny_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    from legato.cli import commands

    loaded = []
    monkeypatch.setattr(commands, "start", lambda resolved, given, watcher, notes: loaded.append(resolved))
    monkeypatch.setattr(commands, "for_terminal", lambda: None)
    monkeypatch.setattr(commands, "_print_ending", lambda run: None)
    with pytest.raises(AttributeError):  # no run, and so no exit code
        commands.train_command([])
    assert loaded[0].config == load([ROOT / "recipes" / "tiny.toml"]).config
