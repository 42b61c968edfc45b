"""Equal seeds and resumed runs give bitwise equal results, and the comparison would notice a fault."""

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

from legato.records.directory import RunDirectory
from legato.run.train import resume, train
from tests.proof import verdicts
from tests.proof.runs import (
    Listener,
    alter_state,
    alter_tensors,
    cut_run,
    differences,
    outcome,
    records,
    run_small,
    state,
    steps,
)

ODD = f"{verdicts.__file__}:odd"
EARLY = f"{verdicts.__file__}:early"

KINDS: dict[str, dict[str, Any]] = {
    "gspo": {
        "reward.kind": EARLY,
        "training.schedule": "cosine",
        "training.warm_up_updates": 3,
        "training.probe_every_steps": 2,
        "training.steps": 5,
    },
    "dapo": {"algorithm": "dapo", "reward.kind": ODD, "rollouts.samples_per_prompt": 2, "task.max_refills": 3},
    "srpo": {
        "algorithm": "srpo",
        "reward.kind": ODD,
        "rollouts.samples_per_prompt": 2,
        "task.problems_per_epoch": 8,
        "training.steps": 5,
    },
    "ppo": {"algorithm": "ppo", "reward.kind": EARLY, "training.value_lr": 1e-2},
    "grpo-kl": {
        "algorithm": "grpo",
        "algorithm.objective.penalties.kl.beta": 0.1,
        "policy.warm_up": {"steps": 2, "examples_per_step": 8},
        "reward.kind": EARLY,
    },
    "replayed": {
        "algorithm": "rspo",
        "policy.model": "tiny-moe",
        "reward.kind": EARLY,
        "training.lr": 1e-2,
        "training.routing_replay": "R2",
        "training.load_balance": 0.01,
    },
    "lora": {"policy.lora.rank": 2, "reward.kind": EARLY, "training.weight_decay": 0.1},
    "lora-kl": {
        "algorithm": "grpo",
        "algorithm.objective.penalties.kl.beta": 0.1,
        "policy.lora.rank": 2,
        "reward.kind": EARLY,
    },
    "lora-moe": {"policy.model": "tiny-moe", "policy.lora.rank": 2, "reward.kind": EARLY},
    "lora-ppo": {"algorithm": "ppo", "policy.lora.rank": 2, "training.value_lr": 1e-2, "reward.kind": EARLY},
    "adaptive": {
        "algorithm.objective.penalties.adaptive-entropy": {"target": 100.0, "step": 0.05},
        "reward.kind": EARLY,
    },
    "band": {
        "algorithm": "gspo-auto",
        "reward.kind": EARLY,
        "training.updates_per_step": 3,
        "training.probe_every_steps": 3,
        "training.update_passes": "two",
    },
    "random-part": {
        "algorithm": "grpo",
        "algorithm.objective.trust.clip-cov": {"fraction": 0.3, "low": -100.0, "high": 100.0},
        "reward.kind": EARLY,
    },
    "half-precision": {"policy.dtype": "bfloat16", "reward.kind": EARLY, "training.lr": 1e-2},
    "offloaded": {"training.offload_optimizer": True, "reward.kind": EARLY},
    "epochs": {"training.epochs_per_step": 2, "task.shuffle": False, "reward.kind": EARLY, "training.anchor": "recompute"},
    "moe": {"policy.model": "tiny-moe", "policy.tiny.experts": 4, "reward.kind": EARLY},
    "upcycled": {
        "policy.upcycle": {"experts": 4, "noise": 0.1},
        "policy.warm_up": {"steps": 2, "examples_per_step": 8},
        "reward.kind": EARLY,
    },
    "two-stages": {
        "task.stages": 2,
        "task.second": {"kind": "reversal"},
        "task.second_after_steps": 2,
        "reward.kind": EARLY,
    },
    "generators": {"reward.kind": f"{verdicts.__file__}:dice"},
    "stale": {"rollouts.mismatch": {"kind": "stale", "updates": 3}, "reward.kind": EARLY},
    "perturbed": {"rollouts.mismatch": {"kind": "perturbed", "size": 0.05}, "reward.kind": EARLY},
    "kv-int8": {"rollouts.mismatch.kind": "kv-int8", "reward.kind": EARLY},
}


pytestmark = [
    pytest.mark.usefixtures("lightly"),
    # peft's own patterns for adapters on experts.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the uninterrupted run of a kind; each kind runs once."""

    @cache
    def run_kind(kind: str) -> Path:
        return run_small(tmp_path_factory.mktemp(kind), KINDS[kind]).directory

    return run_kind


def last_step(run: Path) -> int:
    return RunDirectory.open(run).checkpoint_steps()[-1]


# The same seed twice


@pytest.mark.parametrize("kind", ["gspo", "lora", "generators"])
def test_the_same_seed_twice_is_equal_to_the_bit(straight: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    """Adapters are drawn from the seed too, and so is what a reward draws from the global generators."""
    first = outcome(straight(kind))
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
    again = run_small(tmp_path, KINDS[kind]).directory
    assert differences(first, outcome(again)) == []


def test_another_seed_draws_other_adapters(straight: Callable[[str], Path], tmp_path: Path) -> None:
    other = run_small(tmp_path, {**KINDS["lora"], "training.seed": 1, "training.steps": 1}).directory
    first, second = (
        load_file(run / "checkpoints/step-000001/model/adapter_model.safetensors") for run in (straight("lora"), other)
    )
    name = next(name for name in first if "lora_A" in name)
    assert not torch.equal(first[name], second[name])


def test_another_seed_is_another_run(straight: Callable[[str], Path], tmp_path: Path) -> None:
    other = run_small(tmp_path, {**KINDS["gspo"], "training.seed": 1}).directory
    differs = differences(outcome(straight("gspo")), outcome(other))
    assert {"metrics", "rollouts", "model/model.safetensors", "optimizer.safetensors"} <= set(differs)


def test_the_stored_recipe_repeats_the_run(straight: Callable[[str], Path], tmp_path: Path) -> None:
    again = train(recipe=straight("gspo") / "config.toml", **{"output.directory": str(tmp_path)}).directory
    assert differences(outcome(straight("gspo")), outcome(again)) == []


def test_the_intervals_of_evaluations_and_records_change_no_weight(straight: Callable[[str], Path], tmp_path: Path) -> None:
    rarely = {"evaluation.every_steps": 0, "output.checkpoint_every_steps": 0, "output.rollouts_every_steps": 0}
    other = run_small(tmp_path, {**KINDS["gspo"], **rarely}).directory
    one, two = outcome(straight("gspo")), outcome(other)
    assert one["model/model.safetensors"] == two["model/model.safetensors"]
    assert one["optimizer.safetensors"] == two["optimizer.safetensors"]


def test_every_kind_of_run_changes_its_weights(straight: Callable[[str], Path]) -> None:
    """A run in which nothing happened would resume to anything."""
    for kind in KINDS:
        run = straight(kind)
        first, last = state(run / "checkpoints/step-000001"), state(run / "checkpoints" / f"step-{last_step(run):06d}")
        weights = "model/adapter_model.safetensors" if kind.startswith("lora") else "model/model.safetensors"
        assert first[weights] != last[weights], kind
        assert all(record["update/applied"] == 1 for record in steps(run)), kind
    assert max(record["groups/rounds"] for record in steps(straight("dapo"))) > 1
    assert outcome(straight("srpo"))["trainer.json/trainer"]["collector"]["solved"]
    assert (straight("grpo-kl") / "reference" / "model.safetensors").is_file()
    assert outcome(straight("adaptive"))["trainer.json/trainer"]["state"]["adaptive-entropy"]["coefficient"] > 0
    band = outcome(straight("band"))["trainer.json/trainer"]["state"]["auto-clip"]
    assert band["updates"] == 8 and abs(band["log_high"] - 4e-4) > 1e-5
    assert any(record["update/two_pass"] > 0 for record in steps(straight("gspo")))
    assert "value_head.safetensors" in outcome(straight("ppo"))
    masters = outcome(straight("half-precision"))["optimizer.safetensors"]
    assert any(name.startswith("master|") for name in masters)


# Cut and resumed


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_straight_one(kind: str, straight: Callable[[str], Path], tmp_path: Path) -> None:
    run = cut_run(straight(kind), tmp_path, 2)
    resume(run)
    assert differences(outcome(straight(kind)), outcome(run)) == []


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_a_run_can_be_resumed_at_any_step(step: int, straight: Callable[[str], Path], tmp_path: Path) -> None:
    run = cut_run(straight("gspo"), tmp_path, step)
    listener = Listener()
    ended = resume(run, watcher=listener)
    assert listener.titles == [f"run: resumed at step {step} from step-{step:06d}"]
    assert listener.steps == list(range(step + 1, 6))
    assert ended.reason == "all steps done"
    assert differences(outcome(straight("gspo")), outcome(run)) == []


def test_a_run_can_be_resumed_at_a_random_step(straight: Callable[[str], Path], tmp_path: Path) -> None:
    kind, step = random.Random().choice(["dapo", "srpo", "ppo"]), random.Random().randrange(1, 5)
    run = cut_run(straight(kind), tmp_path, step)
    resume(run)
    assert differences(outcome(straight(kind)), outcome(run)) == [], (kind, step)


@pytest.mark.parametrize("kind", ["gspo", "srpo", "adaptive"])
def test_a_run_can_be_resumed_several_times(kind: str, straight: Callable[[str], Path], tmp_path: Path) -> None:
    run = cut_run(straight(kind), tmp_path, 1)
    for step in (1, 1, 2, 3):
        end_after = step + 1

        def stop(report: Any, end: int = end_after) -> None:
            if report.step == end:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            resume(run, callback=stop)
    resume(run)
    resume(run)
    assert differences(outcome(straight(kind)), outcome(run)) == []


def test_a_resume_that_dies_before_its_first_step_changes_nothing(
    straight: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut_run(straight("gspo"), tmp_path, 2)

    def dies(execution: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("legato.run.train.Execution.go", dies)
        for _ in range(2):
            with pytest.raises(MemoryError):
                resume(run)
    resume(run)
    assert differences(outcome(straight("gspo")), outcome(run)) == []


def test_a_run_may_be_moved_before_it_is_resumed(straight: Callable[[str], Path], tmp_path: Path) -> None:
    run = cut_run(straight("gspo"), tmp_path, 3)
    moved = tmp_path / "another place" / "übung\n2"
    shutil.copytree(run, moved)
    resume(moved)
    one, two = outcome(straight("gspo")), outcome(moved)
    assert differences(one, two) == []


def test_more_steps_than_planned_equal_a_run_planned_so(tmp_path: Path) -> None:
    options = {"reward.kind": EARLY}
    short = run_small(tmp_path / "short", {**options, "training.steps": 3}).directory
    long = run_small(tmp_path / "long", {**options, "training.steps": 5}).directory
    resume(short, ["training.steps=5"])
    one, two = outcome(long), outcome(short)
    assert one["model/model.safetensors"] == two["model/model.safetensors"]
    assert one["optimizer.safetensors"] == two["optimizer.safetensors"]
    assert [r for r in records(long) if r["kind"] == "step"] == [r for r in records(short) if r["kind"] == "step"]


def test_a_finished_run_that_is_resumed_knows_its_accuracy(straight: Callable[[str], Path], tmp_path: Path) -> None:
    last = [record for record in records(straight("gspo")) if record["kind"] == "evaluation"][-1]
    again = resume(cut_run(straight("gspo"), tmp_path, 5))
    assert (again.accuracy, again.accuracy_greedy) == (last["eval/accuracy_sampled"], last["eval/accuracy_greedy"])
    assert again.exit_code == 0


def test_metrics_torn_by_a_crash_are_written_again(straight: Callable[[str], Path], tmp_path: Path) -> None:
    run = cut_run(straight("gspo"), tmp_path, 2)
    data = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(data[:-20])
    resume(run)
    assert differences(outcome(straight("gspo")), outcome(run)) == []


# Negative controls: every saved component is needed, and the comparison notices if one is missing


def reset_value(*path: str, value: Any) -> Callable[[Path], None]:
    def change(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        assert path[-1] in state
        assert state[path[-1]] != value, "a fresh run has the same value: the test would prove nothing"
        state[path[-1]] = value

    return lambda checkpoint: alter_state(checkpoint, change)


def reset_tensors(file: str, prefix: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if name.startswith(prefix)]
        assert names
        for name in names:
            tensors[name] = torch.zeros_like(tensors[name])

    return lambda checkpoint: alter_tensors(checkpoint, file, change)


def reset_generator(name: str) -> Callable[[Path], None]:
    def reverse_numpy(state: dict[str, Any]) -> None:
        state["generators"]["numpy"][1] = state["generators"]["numpy"][1][::-1]

    def reset_torch(tensors: dict[str, torch.Tensor]) -> None:
        tensors["torch"] = torch.Generator().manual_seed(5).get_state()

    if name == "torch":
        return lambda checkpoint: alter_tensors(checkpoint, "random.safetensors", reset_torch)
    return lambda checkpoint: alter_state(checkpoint, reverse_numpy)


CONTROLS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "first moments": ("gspo", reset_tensors("optimizer.safetensors", "exp_avg|")),
    "second moments": ("gspo", reset_tensors("optimizer.safetensors", "exp_avg_sq|")),
    "steps of adam": ("gspo", reset_tensors("optimizer.safetensors", "step|")),
    "updates": ("gspo", reset_value("optimizer", "updates", value=0)),
    "steps done": ("gspo", reset_value("trainer", "steps_done", value=0)),
    "skipped": ("gspo", reset_value("trainer", "skipped", value={})),
    "anchor choice": ("adaptive", reset_value("trainer", "anchor_choice", value="recompute")),
    "cursor": ("gspo", reset_value("trainer", "collector", "cursor", value=0)),
    "policy version": ("gspo", reset_value("trainer", "collector", "version", value=0)),
    "solved": ("srpo", reset_value("trainer", "collector", "solved", value=[])),
    "part state": (
        "adaptive",
        reset_value("trainer", "state", value={"adaptive-entropy": {"coefficient": 0.0, "active": 0.0}}),
    ),
    "band": (
        "band",
        reset_value(
            "trainer", "state", value={"auto-clip": {"log_low": 3e-4, "log_high": 4e-4, "noise": 0.0, "updates": 4.0}}
        ),
    ),
    "updates of a random part": ("random-part", reset_value("optimizer", "updates", value=0)),
    "best": ("gspo", reset_value("best", value=None)),
    "value head": ("ppo", reset_tensors("value_head.safetensors", "")),
    "masters": ("half-precision", reset_tensors("optimizer.safetensors", "master|")),
    "adapters": ("lora", reset_tensors("model/adapter_model.safetensors", "")),
    "weights": ("gspo", reset_tensors("model/model.safetensors", "")),
    "numpy's generator": ("generators", reset_generator("numpy")),
    "torch's generator": ("generators", reset_generator("torch")),
    "past weights": ("stale", reset_tensors("sampler.safetensors", "")),
    "probed": ("perturbed", reset_value("trainer", "probed", value=False)),
}


@pytest.mark.parametrize("component", CONTROLS)
def test_the_comparison_notices_every_lost_component(
    component: str, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, lose = CONTROLS[component]
    run = cut_run(straight(kind), tmp_path, 2)
    lose(run / "checkpoints/step-000002")
    try:
        resume(run)
    except ValueError:
        return
    assert differences(outcome(straight(kind)), outcome(run)) != []
