"""Every command that README, docs and recipes tell a person to type does what it says, on a small scale."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.proof.command import Command

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(?:\w*)\n(.*?)```", re.DOTALL)
SMALL = [
    *("training.steps=1", "training.prompts_per_step=4", "training.updates_per_step=2", "training.warm_up_updates=0"),
    *("policy.tiny.hidden=32", "policy.tiny.layers=2", "policy.warm_up.steps=2", "rollouts.max_response_tokens=24"),
    *("evaluation.every_steps=1", "task.held_out=4"),
]
NEEDS_A_HUB = ("qwen3-", "smollm2")
"""Their recipes are loaded and resolved here; what they name is not on every machine."""


def commands() -> list[str]:
    lines = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in BLOCK.findall(page.read_text()):
            lines += [line.split("  #")[0].strip() for line in block.splitlines()]
    for recipe in [*sorted((ROOT / "recipes").rglob("*.toml")), *sorted((ROOT / "studies").glob("*.toml"))]:
        lines += re.findall(r"^# Command: (.*)$", recipe.read_text(), re.MULTILINE)
    pieces = [piece.strip() for line in lines for piece in line.split("&&")]
    return sorted({piece for piece in pieces if re.match(r"(\.venv/bin/)?legato |make ", piece)})


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run for the verbs that need one, made by a process as a user would."""
    folder = tmp_path_factory.mktemp("commands")
    words = ["train", "recipes/tiny.toml", *SMALL, f"output.directory={folder}", "output.name=NAME"]
    subprocess.run([sys.executable, "-m", "legato.cli.main", *words], check=True, cwd=ROOT)
    return folder / "NAME"


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_every_make_target_exists(command: str) -> None:
    target = shlex.split(command)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("make ")])
def test_every_legato_command_runs(
    command: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[1:]
    words = [str(run) if word == "runs/NAME" else str(tmp_path / word) if word == "my-model" else word for word in words]
    if words[0] == "train":
        if any(name in word for word in words for name in NEEDS_A_HUB):
            from legato.config.load import load

            load([ROOT / word for word in words[1:] if word.endswith(".toml")], [w for w in words[1:] if "=" in w])
            return
        words += [*SMALL, f"output.directory={tmp_path}"]
    if words[0] == "compare":
        if "--arm" not in words:
            from legato.compare.definition import from_file
            from legato.compare.jobs import differences, jobs

            assert differences(jobs(from_file(Path(words[1]), {}), tmp_path)) == []
            return
        words += [*SMALL, "--seeds", "0", "--out", str(tmp_path)]
    if words[0] == "study":
        from legato.compare.jobs import differences, jobs
        from legato.compare.registration import read_study

        definition = read_study(Path(words[1])).definition
        assert differences(jobs(replace(definition, seeds=definition.seeds[:1]), tmp_path)) == []
        return
    if words[0] == "lab":
        words += ["--no-png", "--out", str(tmp_path)]
    code, _, error = Command(monkeypatch, capsys)(*words)
    assert code == 0, error
