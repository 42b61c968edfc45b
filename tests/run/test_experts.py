"""Runs of a mixture of experts: RSPO and router shift as a plug-in, and measures in every run."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.proof import verdicts
from tests.proof.runs import run_small, steps

MOE: dict[str, Any] = {
    "policy.model": "tiny-moe",
    "policy.tiny.layers": 2,
    "reward.kind": f"{verdicts.__file__}:early",
    "training.lr": 1e-2,
    "training.updates_per_step": 4,
}


pytestmark = pytest.mark.usefixtures("lightly")


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "rspo"},
        {"algorithm": "rspo", "training.routing_replay": "R2"},
        {"algorithm": "rspo", "training.routing_replay": "R3", "training.anchor": "recompute"},
        {"algorithm": "grpo", "algorithm.objective.corrections.router-shift.floor": 0.7},
        {"algorithm": "gspo", "algorithm.objective.corrections.router-shift.floor": 0.9, "training.update_passes": "two"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_router_shift_is_trained_with_end_to_end(options: dict[str, Any], tmp_path: Path) -> None:
    logged = steps(run_small(tmp_path, {**MOE, **options, "training.steps": 2}).directory)
    for record in logged:
        assert record["update/applied"] == 1.0 and math.isfinite(record["gradient/norm"])
        assert record["router/shift_mean@0"] == pytest.approx(1.0, abs=1e-6)
        assert 0.0 < record["router/shift_mean@3"] < 1.0 and record["router/flip_mean@3"] > 0.0
        assert record["router/shift_p10"] <= record["router/shift_mean"] and record["router/floored"] >= 0.0


def test_every_run_of_a_mixture_is_measured_without_an_option(tmp_path: Path) -> None:
    (record,) = steps(run_small(tmp_path, {**MOE, "training.steps": 1}).directory)
    for key in ("flip_mean", "any_flip", "jaccard", "flip_layer0", "flip_layer1", "entropy", "load_max", "load_unused"):
        assert record[f"router/{key}"] is not None, key
    assert record["router/flip_mean@0"] == record["router/mismatch_flip_mean"] == 0.0 < record["router/flip_mean@3"]
    assert -1 <= record["router/flip_token_correlation"] <= 1 and -1 <= record["router/flip_sequence_correlation"] <= 1


@pytest.mark.parametrize(
    "mismatch",
    [
        {"kind": "bf16"},
        {"kind": "kv-int8"},
        {"kind": "perturbed", "size": 0.3},
        {"kind": "stale", "updates": 4},
    ],
    ids=lambda mismatch: str(mismatch["kind"]),
)
def test_the_routes_of_a_sampler_that_differs_are_replayed(mismatch: dict[str, Any], tmp_path: Path) -> None:
    options = {**MOE, **{f"rollouts.mismatch.{key}": value for key, value in mismatch.items()}, "training.steps": 3}
    logged = {}
    for replay in ("off", "R3"):
        settings = {**options, "training.routing_replay": replay, "training.anchor": "recompute"}
        logged[replay] = steps(run_small(tmp_path / replay, settings).directory)
    # The same weights and the same engine: its first responses are the same; with its routes forced the trainer is not.
    plain, replayed = logged["off"][0], logged["R3"][0]
    assert plain["tokens/response"] == replayed["tokens/response"]
    for record in logged["R3"]:
        assert record["router/replay_missing"] == 0.0 and "router/mismatch_flip_mean" in record
    assert "router/replay_missing" not in plain
    if mismatch["kind"] == "perturbed":
        assert plain["router/mismatch_flip_mean"] > 0.05
        assert replayed["mismatch/k3"] != plain["mismatch/k3"]
    if mismatch["kind"] == "stale":
        # Weights of an update or more ago choose other experts than the trainer's; those of now the same.
        assert plain["router/mismatch_flip_mean"] == 0.0 < logged["off"][-1]["router/mismatch_flip_mean"]


def test_rspo_on_a_dense_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rspo.*router-shift"):
        run_small(tmp_path, {"algorithm": "rspo"})
    assert not list(tmp_path.iterdir())
