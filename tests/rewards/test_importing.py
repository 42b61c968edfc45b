"""User rewards, imported by module or file."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

from legato.core.importing import code_at, imported_modules, make_imported
from legato.rewards.scoring import check_reward

CODE = """
from dataclasses import dataclass
from neighbour_of_reward import WORTH

def right(rollout):
    return WORTH

async def later(rollout, strict=False):
    return 1.0

def two(rollout, answer):
    return 1.0

def none():
    return 1.0

def named(*, rollout):
    return 1.0

@dataclass
class Judge:
    worth: float = 3.0
    def __call__(self, rollout):
        return self.worth

class Needy:
    def __init__(self, path):
        pass
    def __call__(self, rollout):
        return 1.0

class Silent:
    pass

LIMIT = 3
"""


def import_reward(path: str) -> Any:
    """Import and check a reward as a run does."""
    reward = make_imported("reward", path)
    check_reward(reward, path)
    return reward


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    (tmp_path / "rewards_to_import.py").write_text(CODE)
    (tmp_path / "neighbour_of_reward.py").write_text("WORTH = 0.25")
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize("place", ["rewards_to_import", "rewards_to_import.py", "./rewards_to_import.py"])
def test_a_function_or_class_is_imported_from_a_module_or_file(place: str, folder: Path) -> None:
    assert import_reward(f"{place}:right")(None) == 0.25
    assert import_reward(f"{place}:Judge")(None) == 3.0
    assert callable(import_reward(f"{place}:later"))
    assert import_reward(f"{folder}/rewards_to_import.py:right") is import_reward("rewards_to_import.py:right")


def test_a_built_in_reward_is_imported_too() -> None:
    from legato.rewards.verifiers import ExactMatch

    assert import_reward("legato.rewards.verifiers:ExactMatch") == ExactMatch()


def test_a_file_named_like_a_module_does_not_replace_the_module(folder: Path) -> None:
    import math

    (folder / "math.py").write_text("def reward(rollout):\n    return 2.0")
    assert import_reward("math.py:reward")(None) == 2.0
    assert sys.modules["math"] is math


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rewards_to_import", "'module:name' or 'file.py:name' is needed"),
        (":right", "'module:name' or 'file.py:name' is needed"),
        ("rewards_to_import:", "'module:name' or 'file.py:name' is needed"),
        ("rewards_to_import:a b", "'module:name' or 'file.py:name' is needed"),
        (
            "nowhere_at_all:right",
            "nowhere_at_all could not be imported: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("nowhere.py:right", "there is no file"),
        ("rewards_to_import:rihgt", "rewards_to_import has no 'rihgt'; did you mean 'right'?"),
        ("rewards_to_import:LIMIT", "expected a function of one rollout, got int"),
        ("rewards_to_import:two", "expected one positional argument, the rollout, got (rollout, answer)"),
        ("rewards_to_import:none", "expected one positional argument, the rollout, got ()"),
        ("rewards_to_import:named", "expected one positional argument, the rollout, got (*, rollout)"),
        ("rewards_to_import:Needy", "Needy() could not be made without arguments: TypeError"),
        ("rewards_to_import:Silent", "expected a function of one rollout, got Silent"),
    ],
)
def test_unusable_rewards_are_refused_with_the_reason(path: str, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        import_reward(path)
    assert str(refusal.value).startswith(f"reward {path!r}: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise ValueError('mine')", "ValueError: mine"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def (", "SyntaxError"),
        ("import nothing_like_this", "ModuleNotFoundError"),
    ],
)
@pytest.mark.parametrize("place", ["broken_reward", "broken_reward.py"])
def test_a_module_that_fails_to_import_is_refused_with_the_cause(code: str, cause: str, place: str, folder: Path) -> None:
    (folder / "broken_reward.py").write_text(code)
    with pytest.raises(ValueError, match=f"{place} could not be imported: {cause}") as refusal:
        import_reward(f"{place}:right")
    assert refusal.value.__cause__ is not None


def test_the_modules_that_a_file_imports_are_listed_with_it(folder: Path) -> None:
    """Through statements at the top, in functions and in other modules, through packages, and through importlib."""
    own, other = folder / "own_package", folder / "installed/site-packages"
    own.mkdir()
    other.mkdir(parents=True)
    sys.path.append(str(other))
    (other / "installed_module.py").write_text("")
    (own / "__init__.py").write_text("from .first import value\n")
    (own / "first.py").write_text("from . import second\nvalue = 1\n")
    (own / "second.py").write_text("import json\n")
    (own / "unused.py").write_text("")
    (folder / "later_module.py").write_text("")
    (folder / "by_name.py").write_text("")
    (folder / "scores.py").write_text(
        "import importlib, math, torch, installed_module\nfrom own_package import value\n"
        "importlib.import_module('by_name')\n\ndef score(rollout):\n    import later_module\n    return 1.0\n"
    )
    code = code_at("reward", "scores.py:score")
    assert code is not None
    modules = imported_modules([code])
    names = ["by_name", "later_module", "own_package", "own_package.first", "own_package.second"]
    assert [each.reference for each in modules] == names
    assert modules[1].sha256 == hashlib.sha256(b"").hexdigest() and modules[1].file == str(folder / "later_module.py")
    package = code_at("reward", "own_package.first:value")
    assert package is not None
    assert [each.reference for each in imported_modules([package])] == ["own_package", "own_package.second"]
