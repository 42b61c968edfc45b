"""`legato rollouts`: whole samples on the terminal."""

import subprocess
import sys
from pathlib import Path

import pytest

from legato.cli.rollouts import choose_samples, rollouts_command
from legato.core.rollout import Problem, Score
from legato.errors import InputError
from legato.pages.summary import shown_prompt
from legato.records.directory import RunDirectory
from legato.records.rollouts import rollout_record
from tests.proof.responses import response

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?\nuser: two?"})


def record(prompt: str, text: str, reward: float | None) -> dict[str, object]:
    return {"prompt": prompt, "text": text, "reward": reward, "accuracy": 1.0, "tokens": 2, "stop": "end"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = RunDirectory.create(tmp_path, "run")
    directory.write_config("")
    directory.append_metrics({"kind": "start"})
    directory.write_rollouts(1, [record("early", "x", 0.0)])
    rows = [
        record("a", "first\n\x1b[2Jé", 0.5),
        record("a", "second", 1.0),
        record("b", "third", -1.0),
        record("b", "?", None),
    ]
    directory.write_rollouts(5, [*rows, {**rows[3], "unscorable": "it \x07 failed"}])
    return directory.path


def test_whole_samples_are_shown_and_control_characters_are_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts_command(run, step=None, most=5, order=None)
    text = capsys.readouterr().out
    assert text.startswith("step 5: 5 of 5 samples; --step 1\n")
    assert "  response  first\n            \\x1b[2Jé\n" in text and "could not be scored: it \\x07 failed" in text
    assert text.index("first") < text.index("third") < text.index("second")
    rollouts_command(run, step=1, most=5, order=None)
    assert "early" in capsys.readouterr().out
    with pytest.raises(InputError, match="steps with stored rollouts: 1, 5"):
        rollouts_command(run, step=2, most=5, order=None)


def test_the_best_and_the_worst_come_first(run: Path) -> None:
    records = RunDirectory.open(run).read_rollouts(5)
    assert [each["reward"] for each in choose_samples(records, 2, "best")] == [1.0, 0.5]
    assert [each["reward"] for each in choose_samples(records, 9, "worst")] == [-1.0, 0.5, 1.0]
    twins = [records[0], dict(records[0])]
    assert len(choose_samples(twins, 5, None)) == 2


def test_the_prompt_shown_is_the_last_turn_of_the_user() -> None:
    stored = rollout_record(
        response(Problem(prompt=CHAT, answer="1"), "1", 1), Score(reward=1.0, accuracy=1.0, components={})
    )
    assert shown_prompt(stored) == "One?\nuser: two?"
    assert shown_prompt({"prompt": "system: a\nuser: b\nc\nassistant: d\nuser: e\nassistant: f"}) == "e"
    assert shown_prompt({"prompt": "who is user: 5?"}) == "who is user: 5?"
    plain = rollout_record(
        response(Problem(prompt="2+2=", answer="4"), "4", 1), Score(reward=1.0, accuracy=1.0, components={})
    )
    assert shown_prompt(plain) == "2+2=" and "question" not in plain


def test_the_verb_loads_no_torch_and_prints_in_ascii(run: Path) -> None:
    code = f"""
import sys
from legato.cli.main import run_command
sys.argv = ["legato", "rollouts", {str(run)!r}, "--best", "--count", "2"]
try:
    run_command()
finally:
    assert "torch" not in sys.modules
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert b"second" in ended.stdout and b"\\xe9" in ended.stdout
