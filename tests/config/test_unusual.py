"""Values that are certainly wrong are refused; values that are very probably wrong are noted at the start of a run."""

from pathlib import Path
from typing import Any

import pytest

from legato.algorithms.catalogue import algorithm_names
from legato.api import algorithm
from legato.config.load import load
from legato.config.unusual import unusual_values
from legato.errors import InputError
from legato.rollouts.sampling import Sampling
from tests.proof.runs import Listener, light, run_small

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"training.lr": 1e3}, r"training.lr: expected a finite number > 0 and <= 1, got 1000"),
    ({"policy.warm_up.lr": 2.0}, r"policy.warm_up.lr: expected a finite number > 0 and <= 1"),
    ({"rollouts.temperature": 1e-30}, r"rollouts.temperature: expected a finite number >= 0.001 and <= 100"),
    ({"rollouts.temperature": 1e30}, r"rollouts.temperature: expected .* got 1e\+30"),
    ({"evaluation.temperature": 1e-30}, r"evaluation.temperature: expected a finite number >= 0.0001 and <= 100"),
    ({"evaluation.temperature": 1e30}, r"evaluation.temperature"),
    ({"algorithm": "grpo", "algorithm.objective.trust.clip.low": 2}, r"clip.*low: expected at most 1 .* or inf .*got 2"),
    ({"reward.overlong.factor": 1e300}, r"reward.overlong.factor: expected a finite number > 0 and <= 1e\+06"),
    ({"reward.components": {"a": {"kind": "number", "weight": 1e300}}}, r"weight: expected a finite number >= -1e\+06"),
    (
        {"rollouts.mismatch.kind": "perturbed", "rollouts.mismatch.size": 1e18},
        r"size: expected a finite number > 0 and <= 100",
    ),
    (
        {"algorithm": "minirl", "algorithm.objective.corrections.tis.cap": 1e300},
        r"tis.cap: expected .* float32 .*got 1e\+300",
    ),
    ({"policy.upcycle.noise": 1e18}, r"policy.upcycle.noise: expected a finite number >= 0 and <= 100"),
    ({"training.lr": 0.5, "training.weight_decay": 2.0}, r"training.weight_decay: expected less than 1 / training.lr = 0.5"),
]
NOTED: list[dict[str, Any]] = [
    {"training.lr": 0.5},
    {"training.lr": 1e-12},
    {"policy.warm_up.lr": 0.1},
    {"training.gradient_clip": 1e-7},
    {"training.weight_decay": 0.5, "training.lr": 0.05},
    {"training.epochs_per_step": 100},
    {"training.load_balance": 10.0},
    {"rollouts.temperature": 0.01},
    {"rollouts.temperature": 20.0},
    {"rollouts.top_k": 1},
    {"rollouts.top_p": 1e-6},
    {"rollouts.min_p": 0.999},
    {"evaluation.temperature": 10.0},
    {"policy.lora.alpha": 1e6},
    {"policy.upcycle.noise": 5.0},
    {"rollouts.mismatch.size": 10.0, "rollouts.mismatch.kind": "perturbed"},
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: next(reversed(value)))
def test_a_value_that_is_certainly_wrong_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load([], (), options)


@pytest.mark.parametrize("options", NOTED, ids=lambda options: next(iter(options)))
def test_a_value_that_is_probably_wrong_is_noted(options: dict[str, Any]) -> None:
    path = next(iter(options))
    notes = unusual_values(load([], (), options))
    assert [note for note in notes if note.startswith(f"{path} = ") and f"(override {path!r})" in note], notes


def test_the_defaults_of_every_algorithm_are_usual() -> None:
    # log-clip has no bounds of its own
    names = [name for name in algorithm_names() if "log-clip" not in {part.name for part in algorithm(name).objective.trust}]
    turns = {"task.environment": "examples/second_guess.py:SecondGuess"}
    for name in names:
        reads_turns = "turn" in name
        assert unusual_values(load([], (), {"algorithm": name, **(turns if reads_turns else {})})) == [], name


def test_a_run_prints_and_stores_the_note(tmp_path: Path) -> None:
    listener = Listener()
    with light():
        run_small(tmp_path, {"training.lr": 0.5, "training.steps": 1}, watcher=listener)
    assert "training.lr = 0.5 (override 'training.lr') is above 0.01" in listener.said


def test_a_temperature_of_0_is_greedy_and_no_other_is_that_small() -> None:
    assert Sampling(temperature=0.0).temperature == 0
    for temperature in (1e-30, 1e30):
        with pytest.raises(InputError, match="temperature: expected"):
            Sampling(temperature=temperature)


def test_a_lower_bound_of_1_or_inf_is_no_bound() -> None:
    for low in (1.0, float("inf")):
        assert algorithm("grpo", {"objective.trust.clip.low": low}).objective.trust[0].bounds(None).low == low
    with pytest.raises(InputError, match="expected at most 1"):
        algorithm("grpo", {"objective.trust.clip.low": 2.0})
