"""`legato new`: what it writes trains at once."""

from pathlib import Path

import pytest

from legato.records.directory import RunDirectory
from tests.proof.command import Command, assert_refused


@pytest.mark.usefixtures("lightly")
def test_what_new_writes_trains_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = Command(monkeypatch, capsys)
    code, text, _ = command("new", "my project")
    assert code == 0 and "legato train 'my project/recipe.toml'" in text
    assert {path.name for path in Path("my project").iterdir()} == {"recipe.toml", "problems.jsonl", "reward.py"}
    planned, plan, _ = command("train", "my project/recipe.toml", "--dry-run")
    assert planned == 0 and not Path("runs").exists() and set(Path().iterdir()) == {Path("my project")}
    for words in (
        "404,352 parameters",
        "200 steps of 32 prompts x 8 samples",
        "to train on, 100 held out",
        "memory",
        "my project/problems.jsonl",
        "my project/reward.py",
        "runs/jsonl-gspo-seed0-1",
        "nothing was trained or written",
    ):
        assert words in plan, words
    short = [
        "training.prompts_per_step=4",
        "training.steps=2",
        "policy.warm_up.steps=2",
        "task.held_out=8",
        "output.name=run",
    ]
    assert command("train", "my project/recipe.toml", *short)[0] == 0
    run = RunDirectory.open(Path("runs/run"))
    assert len([record for record in run.metrics() if record["kind"] == "step"]) == 2
    assert {row["reward"] for step in run.rollout_steps() for row in run.read_rollouts(step)} <= {0.0, 1.0}
    assert_refused(command("new", "my project"), "my project", "exists")


def test_a_recipe_that_is_started_inside_its_own_folder_says_where_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = Command(monkeypatch, capsys)
    assert command("new", "mine")[0] == 0
    monkeypatch.chdir(tmp_path / "mine")
    start = f"exists: start legato in {tmp_path}, or give that path"
    assert_refused(command("train", "recipe.toml", "--dry-run"), f"{tmp_path}/mine/problems.jsonl {start}")
    elsewhere = ["task.path=problems.jsonl"]
    assert_refused(command("train", "recipe.toml", *elsewhere, "--dry-run"), f"{tmp_path}/mine/reward.py {start}")
    assert_refused(command("train", "recipe.toml", "task.path=other.jsonl"), "there is no such file")
