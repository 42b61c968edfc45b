"""What a run stores of where it starts: equal fingerprints mean the same weights and problems, and only those."""

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.config.load import load
from legato.records.directory import RunDirectory
from legato.run import wire
from legato.training import checkpoint
from tests.proof.runs import SMALL, light, run_small


def origin(folder: Path, **options: Any) -> dict[str, Any]:
    with light():
        run = run_small(folder, {"training.steps": 1, "evaluation.every_steps": 0, **options})
    origins = [record for record in RunDirectory.open(run.directory).metrics() if record["kind"] == "origin"]
    assert len(origins) == 1
    return origins[0]


def test_algorithms_start_alike_and_seeds_do_not(tmp_path: Path) -> None:
    """ppo trains a value head besides; the weights that sample are the same."""
    warm = {"policy.warm_up.steps": 2, "policy.warm_up.examples_per_step": 4}
    one = origin(tmp_path / "gspo", **warm)
    assert one == origin(tmp_path / "ppo", algorithm="ppo", **warm)
    other = origin(tmp_path / "seed", **warm, **{"training.seed": 1})
    assert one["weights"] != other["weights"] and one["problems"] != other["problems"]
    # The fingerprint is of what training starts from, which the warm-up has changed.
    assert one["weights"] != origin(tmp_path / "cold")["weights"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_bit_of_one_weight_changes_the_fingerprint(dtype: str) -> None:
    policy = wire.policy_of(load([], (), {**SMALL, "policy.dtype": dtype}), wire.PythonObjects())
    before = wire.weights_fingerprint(policy)
    assert before == wire.weights_fingerprint(policy)
    weight = next(iter(policy.model.parameters())).data.view(-1).view(torch.uint8)
    weight[-1] ^= 1
    assert wire.weights_fingerprint(policy) != before


@pytest.mark.parametrize(
    "options",
    [{"policy.lora.rank": 2}, {"algorithm": "grpo", "algorithm.objective.penalties.kl.beta": 0.1}],
    ids=["lora", "kl"],
)
def test_the_base_weights_are_hashed_once(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    hash_tensors = wire._hash_tensors

    def count(tensors: Any, *rest: Any) -> str:
        hashed.append(sum(".lora_" not in name for name in tensors))
        return hash_tensors(tensors, *rest)

    monkeypatch.setattr(wire, "_hash_tensors", count)
    record = origin(tmp_path, **options)
    assert sum(each > 0 for each in hashed) == 1
    state = checkpoint.read_state(RunDirectory.open(tmp_path / "run").checkpoint_path(1))
    assert (state["made_of"]["base"]["weights"] == record["weights"]) == ("policy.lora.rank" not in options)
