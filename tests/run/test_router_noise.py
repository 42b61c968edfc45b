"""`training.router_noise`: experts flip between the old pass and the updates, by a dose, and replay undoes it."""

from pathlib import Path
from typing import Any

import pytest

from tests.proof import verdicts
from tests.proof.runs import run_small, steps

MIXTURE: dict[str, Any] = {
    "algorithm": "grpo",
    "policy.model": "tiny-moe",
    "policy.tiny.layers": 2,
    "reward.kind": f"{verdicts.__file__}:early",
    "training.lr": 1e-5,
    "training.steps": 1,
    "training.updates_per_step": 2,
    "evaluation.every_steps": 0,
}

pytestmark = pytest.mark.usefixtures("lightly")


def measured(folder: Path, **options: Any) -> dict[str, Any]:
    (record,) = steps(run_small(folder, {**MIXTURE, **options}).directory)
    return record


def test_more_noise_flips_more_experts_from_the_first_update_on(tmp_path: Path) -> None:
    records = [measured(tmp_path / str(noise), **{"training.router_noise": noise}) for noise in (0.0, 0.01, 0.1, 1.0)]
    flips = [record["router/flip_mean@0"] for record in records]
    assert flips[0] == 0.0 and flips == sorted(flips) and flips[1] < flips[2] < flips[3]
    # With noise the first update is not the old policy: ratios are off 1 from the start.
    spread = [record["ratio/token_log_std"] for record in records]
    assert spread == sorted(spread) and spread[3] > 10 * spread[0]


def test_the_noise_of_a_token_is_the_same_in_both_passes_and_whatever_the_packs(tmp_path: Path) -> None:
    noise = {"training.router_noise": 0.5}
    one = measured(tmp_path / "one", **noise, **{"training.update_passes": "one"})
    two = measured(tmp_path / "two", **noise, **{"training.update_passes": "two"})
    small_packs = measured(tmp_path / "packs", **noise, **{"training.tokens_per_pack": 64})
    for other in (two, small_packs):
        assert other["router/flip_mean@0"] == pytest.approx(one["router/flip_mean@0"], abs=1e-6)
        assert other["gradient/norm"] == pytest.approx(one["gradient/norm"], rel=1e-3)


def test_replay_takes_the_experts_of_the_old_pass_in_spite_of_noise(tmp_path: Path) -> None:
    noise = {"training.router_noise": 1.0}
    free = measured(tmp_path / "free", **noise)
    replayed = measured(tmp_path / "replayed", **noise, **{"training.routing_replay": "R2"})
    # The routers' own choices flip as before; the tokens go where the old pass sent them.
    assert replayed["router/flip_mean@0"] > 0
    assert replayed["ratio/token_log_std"] < free["ratio/token_log_std"]


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="router_noise"):
        run_small(tmp_path, {**MIXTURE, "policy.model": "tiny", "training.router_noise": 0.1})
