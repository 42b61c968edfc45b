"""Runs with a sampler that differs: an unsafe anchor is refused with its numbers, and accuracy is the policy's own."""

from pathlib import Path
from typing import Any

import pytest

from legato.config.load import load
from legato.run.evaluate import evaluate
from legato.run.memory import demand_of
from legato.run.target import find
from legato.run.train import resume
from legato.run.wire import PythonObjects, policy_of
from tests.proof import verdicts
from tests.proof.command import Command, assert_refused
from tests.proof.runs import SMALL, Listener, records, run_small, words

DIFFERS = {"reward.kind": f"{verdicts.__file__}:early", "rollouts.mismatch.kind": "int8", "training.steps": 2}


pytestmark = pytest.mark.usefixtures("lightly")


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in records(run) if record["kind"] == kind]


def test_an_unsafe_anchor_ends_the_run_and_names_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = Command(monkeypatch, capfd)("train", *words(tmp_path, {**DIFFERS, "training.anchor": "sampler"}))
    message = assert_refused(result, "training.anchor = 'sampler'", "3.0e-04", "1.0e-04")
    assert "training.accept_unsafe_anchor=true" in message and "training.anchor=auto" in message
    (probe,), (end,) = of_kind(tmp_path / "run", "probe"), of_kind(tmp_path / "run", "end")
    assert probe["noise/engine_ratio"] > 1e-4 and end["reason"] in message
    assert not of_kind(tmp_path / "run", "step")


def test_accept_unsafe_anchor_continues_with_a_warning(tmp_path: Path) -> None:
    listener = Listener()
    run = run_small(
        tmp_path, {**DIFFERS, "training.anchor": "sampler", "training.accept_unsafe_anchor": True}, watcher=listener
    )
    assert run.exit_code == 0 and "warning: " in listener.said
    assert all(step["mismatch/max"] == 0 for step in of_kind(run.directory, "step"))


def test_the_auto_anchor_recomputes_if_the_engine_differs(tmp_path: Path) -> None:
    listener = Listener()
    run = run_small(tmp_path, DIFFERS, watcher=listener)
    (probe,) = of_kind(run.directory, "probe")
    assert "recomputed" in listener.said and "warning: " not in listener.said and probe["noise/engine_ratio"] > 1e-4
    assert all(step["mismatch/max"] > 1e-5 for step in of_kind(run.directory, "step"))


def test_an_exact_engine_is_not_refused(tmp_path: Path) -> None:
    options = {**DIFFERS, "rollouts.mismatch.kind": "none", "training.anchor": "sampler"}
    assert run_small(tmp_path, options).exit_code == 0


def test_an_algorithm_without_a_band_is_not_refused(tmp_path: Path) -> None:
    run = run_small(tmp_path, {**DIFFERS, "algorithm": "reinforce", "training.anchor": "sampler"})
    assert run.exit_code == 0


def test_a_stale_sampler_is_judged_once_it_is_stale(tmp_path: Path) -> None:
    stale = {**DIFFERS, "rollouts.mismatch.kind": "stale", "training.steps": 5}
    run = run_small(tmp_path, stale)
    choices = ["recomputed" in probe["words"] for probe in of_kind(run.directory, "probe")]
    assert choices == [False, True, True]  # two updates a step, four updates old
    with pytest.raises(ValueError, match="is not safe here"):
        run_small(tmp_path / "sampler", {**stale, "training.anchor": "sampler"})


def test_a_refused_run_with_a_checkpoint_goes_on_when_the_anchor_is_accepted(tmp_path: Path) -> None:
    warm = {"policy.warm_up": {"steps": 2, "examples_per_step": 8}, "training.anchor": "sampler"}
    with pytest.raises(ValueError, match="is not safe here"):
        run_small(tmp_path, {**DIFFERS, **warm})
    run = resume(tmp_path / "run", ["training.accept_unsafe_anchor=true"])
    assert run.exit_code == 0 and len(of_kind(run.directory, "step")) == 2


@pytest.mark.parametrize("kind", ["stale", "perturbed"])
def test_accuracy_is_measured_on_the_policy_whatever_the_sampler(kind: str, tmp_path: Path) -> None:
    options = {**DIFFERS, "rollouts.mismatch.kind": kind, "task.held_out": 16}
    if kind == "perturbed":
        options["rollouts.mismatch.size"] = 2.0
    run = run_small(tmp_path, options)
    last = of_kind(run.directory, "evaluation")[-1]
    as_trained = ["rollouts.mismatch.kind=none", "rollouts.mismatch.size=false"]
    accuracies = {row.name: row.value for row in evaluate(find(str(run.directory), as_trained)).rows}
    assert accuracies["avg@1"] == last["eval/accuracy_sampled"] and accuracies["greedy"] == last["eval/accuracy_greedy"]


def test_the_memory_estimate_counts_the_copies_of_a_mismatched_sampler() -> None:
    def parameters(**mismatch: Any) -> int:
        resolved = load([], (), {**SMALL, **{f"rollouts.mismatch.{name}": value for name, value in mismatch.items()}})
        return demand_of(resolved, policy_of(resolved, PythonObjects())).parameters

    alone = parameters()
    assert parameters(kind="kv-int8") == alone and parameters(kind="int8") == 2 * alone
    assert parameters(kind="stale", updates=3) == 5 * alone


@pytest.mark.parametrize(("option", "kind"), [("size=0.1", "stale"), ("updates=3", "perturbed"), ("size=0.1", "none")])
def test_a_mismatch_option_of_another_kind_is_refused(option: str, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"rollouts\.mismatch\.{option.split('=')[0]}: .*{kind}"):
        load([], [f"rollouts.mismatch.kind={kind}", f"rollouts.mismatch.{option}"])
