"""`legato resume RUN --step N`: goes back to an earlier checkpoint and keeps the later records in given-up/."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from legato.config.load import load
from legato.health import goback
from legato.health.goback import give_up, positions_at
from legato.records.directory import RunDirectory
from legato.records.lines import Lines
from legato.run.again import restart_advice
from legato.run.train import resume
from legato.training import checkpoint
from tests.proof import verdicts
from tests.proof.command import Command, assert_refused
from tests.proof.runs import Listener, differences, outcome, records, run_small, state, steps

OPTIONS: dict[str, Any] = {"reward.kind": f"{verdicts.__file__}:early", "training.steps": 5}


pytestmark = pytest.mark.usefixtures("lightly")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("straight"), OPTIONS).directory


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(straight, tmp_path / "run"))


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", "report.html")
    }


def test_going_back_without_changes_ends_with_the_same_outcome(straight: Path, run: Path) -> None:
    listener = Listener()
    ended = resume(run, step=2, watcher=listener)
    assert ended.reason == "all steps done" and listener.steps == [3, 4, 5]
    (title,) = listener.titles
    assert "step 2" in title and "step-000002" in title
    assert str(run / "given-up" / "step-000005") in listener.said
    assert differences(outcome(straight), outcome(run)) == []


def test_abandoned_steps_are_kept_unchanged(straight: Path, run: Path) -> None:
    before, directory = files(straight), RunDirectory.open(straight)
    resume(run, step=2)
    given_up, checkpoint_state = run / "given-up" / "step-000005", checkpoint.read_state(directory.checkpoint_path(2))
    assert Lines(given_up / "metrics.jsonl").after(0) == directory.metrics_file.after(checkpoint_state["metrics_position"])
    assert [each["step"] for each in Lines(given_up / "metrics.jsonl").read() if each["kind"] == "step"] == [3, 4, 5]
    moved = {name: data for name, data in files(given_up).items() if not name.endswith(".jsonl")}
    later = ("checkpoints/step-00000", "rollouts/step-00000")
    assert moved == {name: before[name] for name in before if name.startswith(later) and int(name.split("step-")[1][:6]) > 2}
    assert moved
    for step in (3, 4, 5):
        checkpoint.verify(given_up / "checkpoints" / f"step-{step:06d}")


def test_a_change_after_going_back_applies_from_that_step(straight: Path, run: Path) -> None:
    with pytest.raises(ValueError, match="allow-changes"):
        resume(run, ["training.lr=0.001"], step=2)
    assert files(run) == files(straight)
    resume(run, ["training.lr=0.001"], step=2, allow_changes=True)
    assert [each for each in records(run) if each.get("step", 9) <= 2] == [
        each for each in records(straight) if each.get("step", 9) <= 2
    ]
    assert [each["step"] for each in steps(run)] == [1, 2, 3, 4, 5]
    weights = "model/model.safetensors"
    assert outcome(run)[weights] != outcome(straight)[weights]
    assert state(run / "given-up/step-000005/checkpoints/step-000005")[weights] == outcome(straight)[weights]


def test_a_run_can_go_back_several_times(straight: Path, run: Path) -> None:
    for step in (4, 2, 3, 5):
        resume(run, step=step)
    assert sorted(path.name for path in (run / "given-up").iterdir()) == ["step-000005", "step-000005-2", "step-000005-3"]
    assert differences(outcome(straight), outcome(run)) == []


def test_a_missing_checkpoint_is_refused(
    run: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = Command(monkeypatch, capfd)
    assert_refused(command("resume", str(run), "--step", "7"), "step 7", "1, 2, 3, 4, 5")
    path = run / "checkpoints" / "step-000002" / "trainer.json"
    path.write_text(path.read_text() + " ")
    assert_refused(command("resume", str(run), "--step", "2"), "is damaged", "trainer.json")
    assert {name for name in files(run) if files(run)[name] != files(straight).get(name)} == {
        "checkpoints/step-000002/trainer.json"
    }


def test_the_command_goes_back(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = Command(monkeypatch, capfd)("resume", str(run), "--step", "3", "training.steps=4")
    assert code == 0 and "resumed at step 3" in " ".join(out.split())
    assert RunDirectory.open(run).checkpoint_steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("moves", [0, 1, 2, 4])
def test_a_run_that_dies_while_going_back_can_be_resumed(
    moves: int, straight: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Path] = []

    def move(path: Path, to: Path) -> None:
        if len(moved) == moves:
            raise MemoryError
        moved.append(path)
        path.rename(to)

    with monkeypatch.context() as patch:
        patch.setattr(goback.shutil, "move", move)
        with pytest.raises(MemoryError):
            resume(run, step=2)
    resume(run, step=2)
    assert differences(outcome(straight), outcome(run)) == []


def test_going_back_to_the_newest_checkpoint_moves_nothing(straight: Path, run: Path) -> None:
    resume(run, step=5)
    assert not (run / "given-up").exists()
    assert differences(outcome(straight), outcome(run)) == []


def test_evidence_stays_with_the_lines_that_mention_it(run: Path) -> None:
    """The recovery from step 4 to step 2 happened before the checkpoint of step 3; the later alarm did not."""
    directory = RunDirectory.open(run)
    for name in ("step-000004", "step-000005-2"):
        (run / "evidence" / name).mkdir(parents=True)
        (run / "evidence" / name / "finding.json").write_text(name)
    directory.health.append({"kind": "recovery", "step": 2, "from": 4, "evidence": "evidence/step-000004"})
    checkpoint_state = checkpoint.read_state(directory.checkpoint_path(3)) | {
        "health": {"position": directory.health.position()}
    }
    directory.health.append({"kind": "finding", "step": 5, "level": "alarm", "evidence": "evidence/step-000005-2"})
    given_up = give_up(directory, 3, positions_at(directory, checkpoint_state, {"kind": "start"})[0])
    assert given_up is not None
    assert [path.name for path in (run / "evidence").iterdir()] == ["step-000004"]
    assert (given_up / "evidence" / "step-000005-2" / "finding.json").read_text() == "step-000005-2"
    assert [each["kind"] for each in Lines(given_up / "health.jsonl").read()] == ["finding"]


def test_printed_commands_can_be_typed_as_they_are(tmp_path: Path) -> None:
    config = load([], ["output.name=lr=1e-4 b"])
    advice = restart_advice(tmp_path / "my runs" / "lr=1e-4 b", config, ())
    words = shlex.split(advice.partition("begin again with ")[2])
    assert words == ["legato", "train", f"{tmp_path}/my runs/lr=1e-4 b/config.toml", "output.name=lr=1e-4 b-2"]


def test_a_recipe_may_have_an_equals_sign_in_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "lr=1e-4.toml"
    recipe.write_text("[training]\nstepz = 3\n")
    assert_refused(Command(monkeypatch, capfd)("train", str(recipe), "training.seed=1"), f"{recipe}:2", "stepz")
