"""Shell completion, as the shells ask for it: through environment variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from legato.cli import completion
from legato.cli.completion import complete_argument, complete_option
from tests.proof.command import Command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("mine.toml", "notes.txt", "recipes/tiny.toml", ".hidden/x.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_options_and_values_are_completed(folder: Path) -> None:
    assert complete_argument("m") == ["mine.toml"]
    assert complete_argument("recipes/") == ["recipes/tiny.toml"] and "recipes/" in complete_argument("rec")
    assert complete_argument(f"{folder}/mi") == [f"{folder}/mine.toml"]
    assert complete_argument("nothing/") == []
    assert {"training.lr=", "training.load_balance="} == set(complete_option("training.l"))
    assert complete_option("training.schedule")[0].startswith("training.schedule=")
    assert "algorithm=gspo" in complete_option("algorithm=") and "algorithm=gspo" in complete_option("algorithm=gs")
    assert {"task.kind=jsonl", "task.kind=arithmetic"} <= set(complete_option("task.kind="))
    assert complete_option("training.lr=") == []
    assert "policy.packing=true" in complete_option("policy.packing=")
    assert "algorithm.objective.trust.clip.low=" in complete_option("algorithm.objective.trust.cl")
    assert "objective.ratio=geometric" in complete_option("objective.ratio=")


@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [
        ("bash", ["trai"], {"train"}),
        ("bash", ["train", "mi"], {"mine.toml"}),
        ("bash", ["train", "training.weight"], {"training.weight_decay="}),
        ("bash", ["train", "algorithm", "=", "gspo-"], {"gspo-auto", "gspo-token"}),
        ("bash", ["train", "mine.toml", "training.schedule", "="], None),
        ("bash", ["explain", "jso"], {"jsonl"}),
        ("bash", ["compare", "--arm", "dr"], {"dr-grpo"}),
        ("zsh", ["train", "algorithm=gspo-"], {"algorithm=gspo-auto", "algorithm=gspo-token"}),
    ],
)
def test_a_shell_gets_its_completions(
    shell: str,
    words: list[str],
    expected: set[str] | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(completion.VARIABLE, f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["legato", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(["legato", *words]))
    code, text, error = Command(monkeypatch, capsys)()
    assert code == 0, (text, error)
    if shell == "zsh":
        assert expected is not None and all(f'"{each}"' in text for each in expected)
    elif expected is None:
        assert {"constant", "cosine"} <= set(text.split())
    else:
        assert set(text.split()) == expected


def test_completing_loads_no_torch() -> None:
    code = """
import sys
from legato.cli.main import main
sys.argv = ["legato"]
try:
    main()
finally:
    print(sorted({"torch", "numpy", "transformers"} & set(sys.modules)))
"""
    words = {completion.VARIABLE: "complete_bash", "COMP_WORDS": "legato train training.l", "COMP_CWORD": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **words}, check=False, capture_output=True, text=True
    )
    assert ended.stdout.splitlines() == ["training.load_balance=", "training.lr=", "[]"], ended.stderr
