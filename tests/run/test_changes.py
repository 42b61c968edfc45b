"""Resuming with changed options: which are free, which need --allow-changes, which are refused."""

import json
import re
from pathlib import Path

import pytest

from legato.config.changes import check, verdict
from legato.config.document import options
from legato.config.load import load
from legato.errors import InputError
from legato.run.train import resume, train
from tests.proof.command import Command, assert_refused
from tests.proof.runs import SMALL, Listener, cut_run, differences, outcome, run_small

PATHS = [option.path for option in options()]

FREELY = {
    "training.steps",
    "training.probe_every_steps",
    "training.accept_unsafe_anchor",
    "rollouts.rows_at_once",
    "rollouts.kv_memory_share",
    "policy.gradient_checkpointing",
    "training.shard",
    "training.keep_layers",
    "training.rank_deadline_seconds",
}
NEVER = {
    "policy.model",
    "policy.dtype",
    "policy.frozen",
    "training.seed",
    "training.optimizer",
    "training.offload_optimizer",
    "task.kind",
    "task.held_out_share",
    "algorithm.name",
    "output.directory",
    "output.name",
}
"""The saved state would not fit, or held-out problems would have been trained on."""


pytestmark = pytest.mark.usefixtures("lightly")


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("straight"), {"training.steps": 2}).directory


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    return cut_run(straight, tmp_path, 1)


def test_every_option_has_the_expected_resume_rule() -> None:
    for path in PATHS:
        below = path.startswith(("policy.tiny.", "policy.upcycle", "policy.lora", "policy.warm_up"))
        free = path in FREELY or path.startswith(("evaluation.", "health.", "output.", "rollouts.servers."))
        expected = "free" if free and path not in NEVER else "refused" if path in NEVER or below else "flag"
        assert verdict(path) == expected, path


@pytest.mark.parametrize(
    "words", [["training.schedule=cosine"], ["training.warm_up_updates=8", "training.updates_per_step=4"]]
)
def test_steps_that_change_the_learning_rate_need_the_flag(words: list[str]) -> None:
    """A falling schedule is stretched over the steps; a warm-up of 8 updates is shortened in a run of 2 steps."""
    before, after = (load([], [*words, f"training.steps={steps}"]) for steps in (2, 4))
    with pytest.raises(InputError, match=r"training\.steps.*learning rate follows.*--allow-changes"):
        check(before, after, allowed=False)
    told = next(line for line in check(before, after, allowed=True) if "training.steps" in line)
    assert told.endswith("which the learning rate follows (schedule, warm_up_updates)")


def test_a_warm_up_longer_than_the_run_is_shortened_with_a_note(tmp_path: Path) -> None:
    run = run_small(tmp_path, {"training.steps": 1, "training.updates_per_step": 4, "training.warm_up_updates": 40})
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    (note,) = [note for note in lines[0]["notes"] if "warm_up_updates" in note]
    assert "40" in note and "3" in note
    (step,) = [line for line in lines if line["kind"] == "step"]
    assert step["optimizer/lr"] == load([run.directory / "config.toml"]).config.training.lr
    assert load([run.directory / "config.toml"]).config.training.warm_up_updates == 40


@pytest.mark.parametrize("word", ["training.steps=3", "evaluation.every_steps=1", "output.keep_last=1"])
def test_free_options_change_without_a_flag_and_are_printed(word: str, run: Path) -> None:
    listener = Listener()
    assert resume(run, [word], watcher=listener).exit_code == 0
    path, _, value = word.partition("=")
    assert f"changed: {path} = {value}" in listener.said
    assert load([run / "config.toml"]).values[path] == int(value)


@pytest.mark.parametrize(
    "word",
    ["training.lr=0.5", "rollouts.temperature=0.9", "reward.kind=exact", "algorithm.objective.trust.clip.low=0.5"],
)
def test_options_that_change_results_need_allow_changes(word: str, run: Path, straight: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ValueError, match="--allow-changes") as raised:
        resume(run, [word])
    assert word.partition("=")[0] in str(raised.value)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before
    listener = Listener()
    assert resume(run, [word], allow_changes=True, watcher=listener).exit_code == 0
    assert word.partition("=")[0] in listener.said


@pytest.mark.parametrize(
    "word",
    [
        "policy.model=tiny-moe",
        "policy.tiny.hidden=64",
        "policy.upcycle.experts=4",
        "policy.lora.rank=2",
        "policy.warm_up.steps=1",
        "policy.dtype=float64",
        "training.seed=1",
        "training.offload_optimizer=true",
        "task.kind=reversal",
        "task.held_out_share=0.5",
        "algorithm=grpo",
        "output.name=other",
    ],
)
def test_fixed_options_are_refused_with_allow_changes_too(word: str, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    for allow in (False, True):
        with pytest.raises(ValueError, match=rf"{re.escape(word.partition('=')[0])}.*cannot change"):
            resume(run, [word], allow_changes=allow)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before


def test_overrides_equal_to_the_run_change_nothing(run: Path, straight: Path) -> None:
    resume(run, ["training.lr=0.003", "training.seed=0"])
    assert differences(outcome(straight), outcome(run)) == []


def test_all_faults_are_listed_in_one_error(legato: Command, run: Path) -> None:
    code, _, error = legato("resume", str(run), "training.seed=1", "training.lr=1.0", "training.steps=3")
    assert code == 2
    assert "training.seed" in error and "training.lr" in error and "training.steps" not in error
    assert "Traceback" not in error


def test_the_command_line_takes_allow_changes(legato: Command, run: Path) -> None:
    assert_refused(legato("resume", str(run), "training.lr=1.0"), "--allow-changes")
    code, _, error = legato("resume", str(run), "training.lr=1.0", "--allow-changes")
    assert code == 0, error


def test_changed_problems_are_noticed_on_resume(tmp_path: Path) -> None:
    """A file with other problems under the same name: training may have used held-out problems."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(30)))
    options = {"task.kind": "jsonl", "task.path": str(data), "training.steps": 2, "task.left_digits": None}
    chosen = {**SMALL, **options, "output.directory": str(tmp_path / "runs")}
    straight = train(**{path: value for path, value in chosen.items() if value is not None}).directory
    run = cut_run(straight, tmp_path, 1)
    data.write_text("".join(json.dumps({"prompt": f"{n}+2=", "answer": str(n + 2)}) + "\n" for n in range(30)))
    listener = Listener()
    try:
        resume(run, watcher=listener)
    except ValueError as refusal:
        assert "data.jsonl" in str(refusal) or "problems" in str(refusal)
    else:
        assert "changed" in listener.said
