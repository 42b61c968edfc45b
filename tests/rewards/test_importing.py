"""User rewards, imported by module or file."""

import sys
from pathlib import Path
from typing import Any

import pytest

from legato.core.importing import make_imported
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
    (tmp_path / "own_rewards.py").write_text(CODE)
    (tmp_path / "neighbour_of_reward.py").write_text("WORTH = 0.25")
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize("place", ["own_rewards", "own_rewards.py", "./own_rewards.py"])
def test_a_function_or_class_is_imported_from_a_module_or_file(place: str, folder: Path) -> None:
    assert import_reward(f"{place}:right")(None) == 0.25
    assert import_reward(f"{place}:Judge")(None) == 3.0
    assert callable(import_reward(f"{place}:later"))
    assert import_reward(f"{folder}/own_rewards.py:right") is import_reward("own_rewards.py:right")


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
        ("own_rewards", "'module:name' or 'file.py:name' is needed"),
        (":right", "'module:name' or 'file.py:name' is needed"),
        ("own_rewards:", "'module:name' or 'file.py:name' is needed"),
        ("own_rewards:a b", "'module:name' or 'file.py:name' is needed"),
        (
            "nowhere_at_all:right",
            "nowhere_at_all could not be imported: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("nowhere.py:right", "there is no file"),
        ("own_rewards:rihgt", "own_rewards has no 'rihgt'; did you mean 'right'?"),
        ("own_rewards:LIMIT", "expected a function of one rollout, got int"),
        ("own_rewards:two", "expected one positional argument, the rollout, got (rollout, answer)"),
        ("own_rewards:none", "expected one positional argument, the rollout, got ()"),
        ("own_rewards:named", "expected one positional argument, the rollout, got (*, rollout)"),
        ("own_rewards:Needy", "Needy() could not be made without arguments: TypeError"),
        ("own_rewards:Silent", "expected a function of one rollout, got Silent"),
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
