"""The commands, the script and the snippet of docs/operations.md do what the page says."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from legato.cli.main import app
from legato.config.load import load
from tests.dashboard.synthetic import synthetic_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_slurm_script_is_a_script_whose_command_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = blocks("bash")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    calls: list[tuple[list[str], bool]] = []

    def train(arguments: list[str], from_trl: None, *, resume_if_exists: bool, **others: bool) -> int:
        calls.append((arguments, resume_if_exists))
        return 138

    monkeypatch.setattr("legato.cli.commands.train_command", train)
    commands = [*blocks("sh"), next(line for line in script.splitlines() if line.startswith("srun "))]
    for command in commands:
        words = shlex.split(command.removeprefix("srun "))
        assert words[0] == "legato"
        assert CliRunner().invoke(app, words[1:]).exit_code == 138
    assert [resumes for _, resumes in calls] == [True, True]
    for words, _ in calls:
        assert load([Path(words[0])], words[1:]).config.output.name is not None


def test_the_snippet_reads_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    for name in ("one", "two"):
        synthetic_run(tmp_path / "runs", steps=5, name=name)
    monkeypatch.chdir(tmp_path)
    (snippet,) = blocks("python")
    exec(compile(snippet, "operations.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "one" in printed and "two" in printed and "target reached" in printed
