"""Routing replay: a no-op before the first update, and later the gradient of a model with fixed routes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import legato
from legato.policy.model.adapters import Lora
from legato.policy.model.load import Loading, load_policy
from legato.training.tables import Tables
from tests.policy.exact import Words, plain_tables
from tests.policy.routes import FAMILIES, as_published, chosen_by, force_experts, record_router_logits, sets
from tests.training.routed import (
    CPU,
    Forcing,
    copy_policy,
    directions_of,
    exact_policy,
    gspo,
    routes_of,
    run_update,
    tables_of,
)
from tests.training.steps import batch_by_hand, graph_gradient, largest_entry, max_difference, move_weights, one_update


def test_the_first_update_under_r2_changes_no_bit() -> None:
    value, batch = legato.algorithm("grpo"), batch_by_hand()
    texts = replace(batch.texts, temperature=batch.texts.temperature.float())
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs.float(), texts=texts)
    for dtype in (torch.float32, torch.bfloat16):
        for name in FAMILIES:
            policy = load_policy(as_published(name, dtype), Loading(dtype="float32", device="cpu"), tokenizer=Words())
            update = one_update(batch, 30)
            plain = run_update(policy, value, tables_of(policy, value, batch, [update]), update)
            for passes in (1, 2):
                tables = tables_of(policy, value, batch, [update], replay="R2")
                gradient, report = run_update(policy, value, tables, update, passes=passes)
                if passes == 1:
                    assert largest_entry(gradient) > 0 and all(
                        torch.equal(gradient[key], plain[0][key]) for key in gradient
                    ), name
                numbers = report.sums.report()
                assert numbers["router/replay_missing"] == numbers["router/flip_mean"] == 0.0
                assert numbers["ratio/sequence_min"] == numbers["ratio/sequence_max"] == 1.0


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in FAMILIES),
        ("qwen3-moe", {"packing": False}),
        ("qwen3-moe", {"gradient_checkpointing": True}),
        ("gpt-oss", {"gradient_checkpointing": True, "packing": False}),
        ("qwen3-moe", {"lora": Lora(rank=3, alpha=5.0)}),
        ("mixtral", {"lora": Lora(rank=3, alpha=5.0), "gradient_checkpointing": True}),
    ],
)
def test_gradients_under_r2_are_those_of_a_model_with_the_old_routes_built_in(
    name: str, changes: dict[str, Any], passes: int
) -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy(name, **changes)
    update = one_update(batch, 25, policy.packing)
    tables = tables_of(policy, value, batch, [update], replay="R2")
    rows, plain = update.rows.tolist(), copy_policy(policy, name, changes)
    old_routes = Forcing(plain, batch, rows)
    move_weights(policy, 0.05)
    move_weights(plain, 0.05)
    free = graph_gradient(plain, value, tables, rows)
    with force_experts(plain, name, old_routes):
        expected = graph_gradient(plain, value, tables, rows)
    assert old_routes.calls == 2 * len(rows)
    gradient, report = run_update(policy, value, tables, update, passes=passes)
    numbers = report.sums.report()
    assert max_difference(gradient, expected) < 1e-10 < 1e-5 < max_difference(expected, free)
    assert numbers["router/flip_mean"] > 0.02 and numbers["router/replay_missing"] == 0.0
    router = next(key for key in gradient if "gate." in key or "router." in key)
    assert float(gradient[router].abs().max()) > 1e-6


def test_after_a_move_r2_uses_the_old_experts_with_gates_of_the_live_logits() -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy()
    update = one_update(batch)
    tables = tables_of(policy, value, batch, [update], replay="R2")
    move_weights(policy, 0.1)
    assert tables.replay is not None and policy.routers is not None
    used: list[Any] = []
    with record_router_logits(policy.model) as logits:
        handles = [
            layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: used.append(inputs[1:]))
            for layer in policy.body.model.layers
        ]
        packed = policy.pack(tables.texts, update.rows)
        policy.score(tables.texts, update.rows, replace(directions_of(tables), record=False))
        for handle in handles:
            handle.remove()
    recorded = tables.replay.experts[packed.source]
    live = 0
    for layer, (experts, gates) in enumerate(used):
        assert torch.equal(experts, recorded[:, layer].long())
        own = chosen_by(logits[layer])
        live += sum(a != b for a, b in zip(sets(own), sets(experts), strict=True))
        chosen = logits[layer].softmax(-1).gather(-1, experts)
        assert torch.allclose(gates, chosen / chosen.sum(-1, keepdim=True), atol=1e-14)
    assert live > 5


def test_r3_with_an_engine_that_is_the_trainer_changes_nothing() -> None:
    value, policy, batch = gspo(), exact_policy(), batch_by_hand()
    batch = replace(batch, routes=routes_of(policy, batch))
    update = one_update(batch, 25)
    plain = tables_of(policy, value, batch, [update])
    replayed = tables_of(policy, value, batch, [update], replay="R3")
    assert plain.old_logprobs is not None and replayed.old_logprobs is not None
    assert torch.equal(plain.old_logprobs, replayed.old_logprobs)
    without, _ = run_update(policy, value, plain, update)
    gradient, report = run_update(policy, value, replayed, update)
    numbers = report.sums.report()
    assert largest_entry(gradient) > 0 and all(torch.equal(gradient[key], without[key]) for key in gradient)
    assert numbers["router/replay_missing"] == numbers["router/mismatch_flip_mean"] == 0.0
    assert numbers["router/mismatch_any_flip"] == numbers["router/mismatch_flip_layer1"] == 0.0


@pytest.mark.parametrize("skip_first", [False, True])
@pytest.mark.parametrize("packing", [True, False])
def test_r3_forces_the_routes_of_the_engine_on_old_and_new_and_not_on_the_reference(packing: bool, skip_first: bool) -> None:
    value = legato.algorithm("grpo", {"objective.penalties.kl.beta": 0.3})
    policy, batch = exact_policy(packing=packing), batch_by_hand()
    rows = list(range(len(batch)))
    unforced = plain_tables(policy, Tables.from_batch(batch, CPU).texts, rows)[0].detach()
    engine = exact_policy(packing=packing)
    move_weights(engine, 0.1, seed=21)
    batch = replace(batch, routes=routes_of(engine, batch))
    update = one_update(batch, 25, packing)
    tables = tables_of(policy, value, batch, [update], replay="R3", skip_first=skip_first)
    with force_experts(policy, "qwen3-moe", Forcing(engine, batch, rows)):
        old = plain_tables(policy, tables.texts, rows)[0].detach()
    assert tables.old_logprobs is not None and tables.ref_logprobs is not None
    inside = batch.texts.mask
    if not skip_first:
        assert torch.allclose(tables.old_logprobs[inside], old[inside], atol=1e-12)
    assert torch.allclose(tables.ref_logprobs[inside], unforced[inside], atol=1e-12)
    assert not torch.allclose(old[inside], unforced[inside], atol=1e-4)
    if not skip_first:
        move_weights(policy, 0.02)
    anchored = replace(tables, old_logprobs=old) if skip_first else tables
    with force_experts(policy, "qwen3-moe", Forcing(engine, batch, rows)):
        expected = graph_gradient(policy, value, anchored, rows)
    for passes in (1, 2):
        gradient, report = run_update(policy, value, tables, update, passes=passes)
        assert max_difference(gradient, expected) < 1e-10
        assert report.sums.report()["router/mismatch_flip_mean"] > 0.02


def test_records_that_are_missing_fall_through_and_are_counted() -> None:
    value, policy, batch = gspo(), exact_policy(), batch_by_hand()
    routes = routes_of(policy, batch)
    routes.tokens[batch.texts.prompts.numel() :] = -1
    batch = replace(batch, routes=routes)
    update = one_update(batch)
    tables = tables_of(policy, value, batch, [update], replay="R3")
    numbers = run_update(policy, value, tables, update)[1].sums.report()
    prompts, responses = int(batch.texts.prompt_lengths.sum()), int((batch.texts.lengths - 1).clamp(min=0).sum())
    assert numbers["router/replay_missing"] == pytest.approx(responses / (prompts + responses))


def test_an_engine_of_another_model_is_refused() -> None:
    policy, batch = exact_policy(), batch_by_hand()
    routes = routes_of(policy, batch)
    tables = Tables.from_batch(replace(batch, routes=replace(routes, count=8)), CPU)
    with pytest.raises(ValueError, match=r"2 of 8 experts.*2 of 4"):
        tables.with_routes(policy.routers, "R3")
    three = replace(routes, experts=routes.experts[:, :, :1])
    with pytest.raises(ValueError, match="1 of 4 experts"):
        Tables.from_batch(replace(batch, routes=three), CPU).with_routes(policy.routers, "off")
    with pytest.raises(ValueError, match=r"training\.routing_replay = 'R3'"):
        Tables.from_batch(batch, CPU).with_routes(policy.routers, "R3")
