"""Options of mixtures of experts: what they do."""

import pytest

from tests.proof.effects import Bench, effect
from tests.proof.effects_of_training import EARLY, members

MOE = {**EARLY, "policy.model": "tiny-moe", "policy.tiny.layers": 2, "training.skip_silent_rows": False}


@effect("rollouts.record_routes")
def the_experts_of_the_engine(bench: Bench) -> None:
    with_routes, without = (bench.run({**MOE, "rollouts.record_routes": record}) for record in (True, False))
    for rollout in members(with_routes.reports[0]):
        assert rollout.routes.experts.shape == (len(rollout.prompt_tokens) + len(rollout.tokens) - 1, 2, 2)
    assert all(rollout.routes is None for rollout in members(without.reports[0]))
    assert with_routes.steps[0]["router/mismatch_flip_mean"] == 0.0
    assert "router/mismatch_flip_mean" not in without.steps[0]
    assert bench.run(MOE).steps[0]["router/mismatch_flip_mean"] == 0.0
    with pytest.raises(ValueError, match=r"rollouts\.record_routes = true needs a mixture of experts.*it has no experts"):
        bench.run({"rollouts.record_routes": True})


@effect("training.routing_replay")
def the_routes_of_the_past(bench: Bench) -> None:
    options = {**MOE, "training.lr": 3e-2, "training.anchor": "recompute", "training.updates_per_step": 4}
    runs = {replay: bench.run({**options, "training.routing_replay": replay}) for replay in ("off", "R2", "R3")}
    for replay, run in runs.items():
        step = run.steps[0]
        assert step["router/flip_mean@0"] == 0.0 < step["router/flip_mean@3"]
        assert step.get("router/replay_missing") == (None if replay == "off" else 0.0)
    # Until the first update has moved the policy nothing is forced that would not have been chosen.
    assert len({run.steps[0]["loss/total@1"] for run in runs.values()}) == 2
    assert runs["off"].steps[0]["loss/total@0"] == runs["R2"].steps[0]["loss/total@0"]
    with pytest.raises(ValueError, match=r"training\.routing_replay = 'R2' needs a mixture of experts.*it has no experts"):
        bench.run({"training.routing_replay": "R2"})
    with pytest.raises(ValueError, match=r"needs rollouts\.record_routes = true"):
        bench.run({**MOE, "training.routing_replay": "R3", "rollouts.record_routes": False})


@effect("training.router_noise")
def the_noise_of_the_routers(bench: Bench) -> None:
    still, noisy = (bench.run({**MOE, "training.router_noise": scale}).steps[0] for scale in (0.0, 1.0))
    assert still["router/flip_mean@0"] == 0.0 < noisy["router/flip_mean@0"]
    with pytest.raises(ValueError, match=r"training\.router_noise = 0\.1 needs a mixture of experts"):
        bench.run({"training.router_noise": 0.1})


@effect("training.load_balance")
def the_loss_of_the_routers(bench: Bench) -> None:
    options = {**MOE, "training.steps": 8}
    strong, weak = (bench.run({**options, "training.load_balance": scale}).steps for scale in (1.0, 1e-9))
    assert strong[-1]["router/balance"] - 1 < 0.5 * (weak[-1]["router/balance"] - 1)
    assert strong[-1]["router/load_max"] < weak[-1]["router/load_max"] and strong[0]["update/two_pass"] == 1.0
    assert "router/balance" not in bench.run(options).steps[0]
    with pytest.raises(ValueError, match="takes two passes"):
        bench.run({**options, "training.load_balance": 1.0, "training.update_passes": "one"})
    with pytest.raises(ValueError, match=r"training\.load_balance = 0\.1 needs a mixture of experts"):
        bench.run({"training.load_balance": 0.1})
