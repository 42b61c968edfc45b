"""Resuming with changed keys: what is free, what needs a flag, what is refused; every option has its place."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from legato.config.changes import FREE, REFUSED, verdict
from legato.config.document import options
from legato.config.load import load
from legato.run.train import resume, train
from tests.proof.command import Command, refused
from tests.proof.runs import SMALL, Listener, cut, differences, outcome, small

PATHS = [option.path for option in options()]

FREELY = {
    "training.steps",
    "training.probe_every_steps",
    "training.accept_unsafe_anchor",
    "rollouts.rows_at_once",
    "rollouts.kv_memory_share",
    "policy.gradient_checkpointing",
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
    return small(tmp_path_factory.mktemp("straight"), {"training.steps": 2}).directory


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    return cut(straight, tmp_path, 1)


def test_every_option_has_its_place() -> None:
    for path in PATHS:
        below = path.startswith(("policy.tiny.", "policy.upcycle", "policy.lora", "policy.warm_up"))
        free = path in FREELY or path.startswith(("evaluation.", "health.", "output."))
        expected = "refused" if path in NEVER or below else "free" if free else "flag"
        assert verdict(path) == expected, path


def test_every_pattern_is_of_an_option() -> None:
    for pattern in (*FREE, *REFUSED):
        assert any(fnmatchcase(path, pattern) for path in PATHS), pattern


@pytest.mark.parametrize("word", ["training.steps=3", "evaluation.every_steps=1", "output.keep_last=1"])
def test_what_is_free_needs_no_flag_and_is_told(word: str, run: Path) -> None:
    listener = Listener()
    assert resume(run, [word], watcher=listener).exit_code == 0
    path, _, value = word.partition("=")
    assert f"changed: {path} = {value}" in listener.said
    assert load([run / "config.toml"]).values[path] == int(value)


@pytest.mark.parametrize(
    "word",
    ["training.lr=0.5", "rollouts.temperature=0.9", "reward.kind=exact", "algorithm.objective.trust.clip.low=0.5"],
)
def test_what_makes_another_run_needs_the_flag(word: str, run: Path, straight: Path) -> None:
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
def test_what_cannot_change_is_refused_with_the_flag_too(word: str, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    for allow in (False, True):
        with pytest.raises(ValueError, match="cannot change in a resumed run"):
            resume(run, [word], allow_changes=allow)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before


def test_a_change_that_is_none_is_none(run: Path, straight: Path) -> None:
    resume(run, ["training.lr=0.003", "training.seed=0"])
    assert differences(outcome(straight), outcome(run)) == []


def test_all_faults_are_told_at_once(legato: Command, run: Path) -> None:
    code, _, error = legato("resume", str(run), "training.seed=1", "training.lr=1.0", "training.steps=3")
    assert code == 2
    assert "training.seed" in error and "training.lr" in error and "training.steps" not in error
    assert "Traceback" not in error


def test_the_flag_of_the_command_line(legato: Command, run: Path) -> None:
    refused(legato("resume", str(run), "training.lr=1.0"), "--allow-changes")
    code, _, error = legato("resume", str(run), "training.lr=1.0", "--allow-changes")
    assert code == 0, error


def test_problems_that_changed_since_are_seen(tmp_path: Path) -> None:
    """Another file under the same name is another run: what was held out may have been trained on."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(30)))
    options = {"task.kind": "jsonl", "task.path": str(data), "training.steps": 2, "task.left_digits": None}
    chosen = {**SMALL, **options, "output.directory": str(tmp_path / "runs")}
    straight = train(**{path: value for path, value in chosen.items() if value is not None}).directory
    run = cut(straight, tmp_path, 1)
    data.write_text("".join(json.dumps({"prompt": f"{n}+2=", "answer": str(n + 2)}) + "\n" for n in range(30)))
    listener = Listener()
    try:
        resume(run, watcher=listener)
    except ValueError as refusal:
        assert "data.jsonl" in str(refusal) or "problems" in str(refusal)
    else:
        assert "changed" in listener.said
