"""Memory of a setup: the same demand as that of a run, the engine's share, and what grows with what."""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from legato.capacity.memory import LOGITS_AT_ONCE, cached_tokens_per_row, decoded_rows, demand_of, need_of
from legato.capacity.model import find_model
from legato.capacity.setup import setup_of
from legato.config.load import load
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.run import memory as run_memory
from legato.run.wire import PythonObjects, policy_of
from tests.capacity.setups import model, setup
from tests.proof.runs import SMALL

DIFFERENT = {"cached_tokens", "head_tokens", "step_cells", "several_packs", "sharding"}
"""What depends on the device, or what a run does not estimate."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy.model": "tiny-moe", "training.routing_replay": "R2"},
        {"policy.lora.rank": 4},
        {"algorithm": "ppo"},
        {"policy.frozen": ["*embed_tokens*"]},
    ],
    ids=["plain", "mixture", "adapters", "value head", "frozen"],
)
def test_a_plan_has_the_demand_of_the_run(options: dict[str, Any]) -> None:
    """On a CPU in float32, where a run can be loaded here."""
    resolved = load([], (), {**SMALL, "policy.dtype": "float32", **options})
    config = resolved.config.policy
    planned = setup_of(resolved, find_model(config.model, config.tiny), setup().hardware, 1)
    of_run = asdict(run_memory.demand_of(resolved, policy_of(resolved, PythonObjects())))
    of_plan = asdict(demand_of(planned, 0))
    if options.get("policy.lora.rank"):
        assert of_plan.pop("trained") is None and of_run.pop("trained") == planned.model.shape.adapters(4)
    same = of_run.keys() & of_plan.keys() - DIFFERENT
    assert {name: of_plan[name] for name in same} == {name: of_run[name] for name in same}


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize(
    ("more", "whole"),
    [
        ({}, False),
        ({"training.epochs_per_step": 2}, True),
        ({"algorithm.name": "grpo", "algorithm.objective.trust.clip-cov.fraction": 0.2}, True),
        ({"task.environment": "guess"}, True),
    ],
    ids=["own rows", "later epochs", "update scope", "several rows a rollout"],
)
def test_a_gpu_holds_the_trainers_routes_of_its_own_rows_and_all_others(
    gpus: int, more: dict[str, Any], whole: bool
) -> None:
    options = {"policy.model": "tiny-moe", "training.routing_replay": "R2", "training.prompts_per_step": 8, **more}
    resolved = load([], (), {**SMALL, **options})
    config = resolved.config
    policy = policy_of(resolved, PythonObjects())
    of_run = run_memory.demand_of(resolved, policy, gpus)
    of_plan = demand_of(setup_of(resolved, find_model("tiny-moe", config.policy.tiny), setup().hardware, gpus), 0)
    assert of_plan.routed == of_run.routed > 0 and of_plan.replayed == of_run.replayed
    assert of_plan.engine_routed == of_run.engine_routed
    written = 8 * config.rollouts.samples_per_prompt * config.rollouts.max_response_tokens
    assert of_plan.engine_routed == written and of_plan.routed == (written if whole else written // gpus)


@pytest.mark.parametrize("gpus", [1, 3, 8])
@pytest.mark.parametrize("held_out", [2, 200], ids=["step", "evaluation"])
def test_a_run_decides_with_the_kv_cache_of_the_plan(gpus: int, held_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank samples its share of the rows, and the engine decodes no more together than it has room for."""
    options = {"policy.dtype": "float32", "training.prompts_per_step": 16, "task.held_out": held_out}
    resolved = load([], (), {**SMALL, **options})
    config = resolved.config
    policy = policy_of(resolved, PythonObjects())
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    planned = setup_of(resolved, find_model(config.policy.model, config.policy.tiny), setup().hardware, gpus)
    of_run, row = run_memory.demand_of(resolved, policy, gpus), cached_tokens_per_row(planned)
    wanted, fitting = decoded_rows(planned)
    assert wanted == fitting
    assert (wanted < max(planned.prompts * planned.samples, planned.evaluated)) is (gpus > 1)
    assert of_run.cached_tokens == demand_of(planned, wanted).cached_tokens
    assert run_memory._demand_in(planned.hardware.memory, resolved, policy, gpus) == of_run
    # A GPU on which half of the rows fit.
    cache = 2 * of_run.shape.layers * of_run.shape.key * of_run.size * (wanted * row // 2 + planned.response_tokens)
    idle = replace(demand_of(planned, 0), several_packs=True).memory(checkpointing=True)
    held = idle.weights + idle.gradients + idle.masters + idle.moments
    small = replace(planned.hardware, memory=held + int(cache / planned.kv_memory_share) + 1)
    fitting = decoded_rows(replace(planned, hardware=small))[1]
    assert 0 < fitting < wanted
    limited = run_memory._demand_in(small.memory, resolved, policy, gpus)
    assert 0 <= limited.cached_tokens - demand_of(planned, fitting).cached_tokens < row


def test_logits_are_cut_as_the_policy_cuts_them_on_a_gpu() -> None:
    on_gpu: Any = SimpleNamespace(logits_at_once=None, device=SimpleNamespace(type="cuda"), vocabulary=151936)
    assert Policy.tokens_at_once.fget(on_gpu) == LOGITS_AT_ONCE // 151936  # type: ignore[attr-defined]
    assert demand_of(setup(), 0).head_tokens == LOGITS_AT_ONCE // 151936


def test_the_engine_takes_its_share_of_what_training_leaves_free() -> None:
    """large.json: 8B before full training, prompts of 256, 64 new tokens: 18 rows instead of 256."""
    words = ("policy.max_prompt_tokens=256", "rollouts.max_response_tokens=64", "rollouts.rows_at_once=256")
    wanted, rows = decoded_rows(setup("qwen3-8b", 1, *words))
    assert wanted == 256
    # Each row has a prompt of its own: 18 rows are fewer than the 32 prompts.
    assert rows == pytest.approx(18, abs=1)
    few, more = (decoded_rows(setup("qwen3-1.7b", 1, f"rollouts.kv_memory_share={share}"))[1] for share in (0.2, 0.8))
    assert 3.8 < more / few < 4.2
    assert decoded_rows(replace(setup(), servers=True)) == (0, 0)


def test_checkpointing_is_on_only_if_activations_do_not_fit() -> None:
    assert not need_of(setup("qwen3-1.7b")).checkpointing
    automatic = need_of(setup("qwen3-4b"))
    assert automatic.fits and automatic.checkpointing
    kept = need_of(setup("qwen3-4b", 1, "policy.gradient_checkpointing=false"))
    assert not kept.fits and not kept.checkpointing


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["training.tokens_per_pack=65536"], True),
        (["training.tokens_per_pack=8192"], False),
        (["rollouts.rows_at_once=64"], False),
        (["training.optimizer=adamw-8bit"], False),
        (["training.offload_optimizer=true"], False),
        (["policy.dtype=float32"], True),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_settings_move_the_total_the_right_way(words: list[str], more: bool) -> None:
    # Rows at once are few enough that the engine's share never cuts them.
    base = ("rollouts.rows_at_once=128", "policy.gradient_checkpointing=true")
    before, after = (need_of(setup("qwen3-4b", 1, *base, *each)).memory.total for each in ([], words))
    assert (after > before) is more and after != before


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_on_more_gpus_each_needs_less_or_the_same(name: str) -> None:
    sizes = [need_of(replace(setup(name, gpus), servers=True)).memory.total for gpus in (2, 4, 8, 16, 32)]
    assert sizes == sorted(sizes, reverse=True)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(InputError, match=r"policy\.packing"):
        setup("qwen3-8b", 1, "policy.packing=false")
    with pytest.raises(InputError, match=r"expected one of optimizer, layers, got 'rows' \(training.shard\)"):
        setup("qwen3-8b", 8, shard="rows")
    with pytest.raises(InputError, match=r"got 2000 \(--response-tokens\)"):
        setup("qwen3-8b", 1, mean_response=2000)
    with pytest.raises(InputError, match="--gpus"):
        replace(setup(), gpus=0)


def test_several_gpus_shard_the_optimizer_unless_told_otherwise() -> None:
    assert (setup().shard, setup(gpus=8).shard, setup(gpus=8, shard="layers").shard) == ("none", "optimizer", "layers")
    assert setup("qwen3-8b").on(8).shard == "optimizer" and setup(gpus=8, shard="layers").on(64).shard == "layers"
    assert model("qwen3-8b") is model("qwen3-8b")
