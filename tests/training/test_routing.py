"""Routing in an update: its metrics, and the weights of RSPO."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import legato
from legato.algorithms.algorithm import Algorithm
from legato.diagnostics.metrics.routing import router_shift
from legato.policy.policy import Policy
from legato.training.plan import Update, plan
from legato.training.tables import Tables
from tests.policy.exact import plain_tables
from tests.policy.routes import chosen_by, plain_logits, rows_with_tokens
from tests.training.routed import WIDE, exact_policy, gspo, routes_of, run_update, tables_of
from tests.training.steps import batch_by_hand, gradients, largest_entry, max_difference, move_weights, one_update


def test_nothing_flips_and_gamma_is_1_at_equal_weights() -> None:
    value, batch = gspo(), batch_by_hand()
    for packing in (True, False):
        policy = exact_policy(packing=packing)
        step = plan(batch.texts, updates=2, epochs=1, tokens_per_pack=20, seed=2, packing=packing)
        for skip_first in (False, True):
            tables = tables_of(policy, value, batch, step, skip_first=skip_first)
            for update in step:
                for passes in (1, 2):
                    report = run_update(policy, value, tables, update, passes=passes)[1].sums.report()
                    assert report["router/flip_mean"] == report["router/any_flip"] == report["router/jaccard"] == 0.0
                    assert report["router/shift_mean"] == 1.0 and report["router/floored"] == 0.0
                    assert report["router/flip_layer0"] == report["router/flip_layer1"] == 0.0
                    assert 0.0 < report["router/entropy"] < 1.387 and 1.0 <= report["router/load_max"] <= 2.0
                    assert "router/replay_missing" not in report and "router/mismatch_flip_mean" not in report


def routing_by_loops(policy: Policy, tables: Tables, before: dict[int, Tensor]) -> dict[str, float]:
    """The routing metrics in plain loops, from the router logits of each row alone, before and after the move."""
    batch, texts = tables.batch, tables.texts
    flips, any_flips, distances, gammas, entropies, per_token, moved_by = [], [], [], [], [], [], []
    new = plain_tables(policy, texts, range(len(batch)))[0].detach()
    assert tables.old_logprobs is not None
    chosen = [[0] * 4, [0] * 4]
    for row in rows_with_tokens(texts):
        start = int(batch.texts.prompt_lengths[batch.texts.group[row]]) - 1
        now = plain_logits(policy, texts, row)
        for t in range(int(batch.texts.lengths[row])):
            if not batch.texts.mask[row, t]:
                continue
            old_sets, new_sets = (set_of(logits[start + t]) for logits in (before[row], now))
            here, gap = [], 0.0
            for layer in range(2):
                both = len(old_sets[layer] & new_sets[layer])
                here.append(1 - both / 2)
                any_flips.append(float(both < 2))
                distances.append(1 - both / (4 - both))
                old_lp, new_lp = (x[start + t, layer].log_softmax(-1) for x in (before[row], now))
                gap += sum(abs(float(new_lp[e] - old_lp[e])) for e in old_sets[layer]) / 4
                entropies.append(-float((new_lp.exp() * new_lp).sum()))
                for expert in new_sets[layer]:
                    chosen[layer][expert] += 1
            flips.append(here)
            gammas.append(float(torch.tensor(-gap, dtype=torch.float64).exp()))
            per_token.append(sum(here) / 2)
            moved_by.append(abs(float(new[row, t] - tables.old_logprobs[row, t])))
    table = torch.tensor(flips, dtype=torch.float64)
    return {
        "router/flip_mean": float(table.mean()),
        "router/flip_layer0": float(table[:, 0].mean()),
        "router/flip_layer1": float(table[:, 1].mean()),
        "router/any_flip": sum(any_flips) / len(any_flips),
        "router/jaccard": sum(distances) / len(distances),
        "router/shift_mean": sum(gammas) / len(gammas),
        "router/floored": sum(g < 0.8 for g in gammas) / len(gammas),
        "router/entropy": sum(entropies) / len(entropies),
        "router/load_max": sum(4 * max(layer) / sum(layer) for layer in chosen) / 2,
        "router/load_unused": sum(count == 0 for layer in chosen for count in layer) / 8,
        "router/flip_token_correlation": float(torch.corrcoef(torch.tensor([per_token, moved_by]).double())[0, 1]),
    }


def set_of(logits: Tensor) -> list[set[int]]:
    return [set(layer) for layer in chosen_by(logits).tolist()]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("packing", "name"), [(True, "qwen3-moe"), (False, "qwen3-moe"), (True, "gpt-oss"), (True, "olmoe")]
)
def test_routing_metrics_equal_loops_over_single_rows(name: str, packing: bool, passes: int) -> None:
    value, batch, policy = gspo(), batch_by_hand(), exact_policy(name, packing=packing)
    update = one_update(batch, 25, packing)
    tables = tables_of(policy, value, batch, [update])
    before = {row: plain_logits(policy, tables.texts, row) for row in rows_with_tokens(tables.texts)}
    move_weights(policy, 0.08)
    expected = routing_by_loops(policy, tables, before)
    metrics = run_update(policy, value, tables, update, passes=passes)[1].sums.report()
    assert expected["router/flip_mean"] > 0.05 and expected["router/shift_mean"] < 0.99
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert -1 <= metrics["router/flip_sequence_correlation"] <= 1


def test_the_engine_as_anchor_is_the_old_policy_of_the_flips() -> None:
    value, policy, batch = gspo(), exact_policy(), batch_by_hand()
    batch = replace(batch, routes=routes_of(policy, batch), sampler_logprobs=batch.sampler_logprobs.nan_to_num(-1.0))
    update = one_update(batch)
    tables = tables_of(policy, value, batch, [update], choice="sampler")
    numbers = run_update(policy, value, tables, update)[1].sums.report()
    assert numbers["router/flip_mean"] == numbers["router/mismatch_flip_mean"] == 0.0
    assert "router/shift_mean" not in numbers
    move_weights(policy, 0.1)
    later = replace(update, index=1)
    numbers = run_update(policy, value, tables, later)[1].sums.report()
    assert numbers["router/flip_mean"] > 0.02 and "router/mismatch_flip_mean" not in numbers


ROUTER_SHIFT: dict[str, tuple[str, dict[str, Any]]] = {
    "rspo": ("rspo", {}),
    "grpo with router-shift": ("grpo", {"objective.corrections.router-shift.floor": 0.7}),
    "gspo with router-shift": ("gspo", {**WIDE, "objective.corrections.router-shift.floor": 0.9}),
    "gspo with router-shift after the clip": (
        "gspo",
        {**WIDE, "objective.corrections.router-shift.placement": "after-clip"},
    ),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("choice", ["recompute", "sampler"])
@pytest.mark.parametrize("name", ROUTER_SHIFT)
def test_router_shift_weighs_with_the_routers_of_old_and_new_at_the_predicting_position(
    name: str, choice: str, passes: int
) -> None:
    base, own = ROUTER_SHIFT[name]
    value, policy, batch = legato.algorithm(base, own), exact_policy(), batch_by_hand()
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs.nan_to_num(-1.0) / 100 - 3.5)
    update = one_update(batch, 25)
    tables = tables_of(policy, value, batch, [update], choice=choice)
    assert (tables.old_logprobs is tables.sampler_logprobs) is (choice == "sampler")
    before = {row: plain_logits(policy, tables.texts, row).log_softmax(-1) for row in rows_with_tokens(tables.texts)}
    move_weights(policy, 0.03)
    gamma = torch.ones(batch.texts.mask.shape, dtype=torch.float64)
    for row, old in before.items():
        start = int(batch.texts.prompt_lengths[batch.texts.group[row]]) - 1
        new, experts = plain_logits(policy, tables.texts, row).log_softmax(-1), chosen_by(old)
        shift = router_shift(old.gather(-1, experts), new.gather(-1, experts))
        gamma[row, : batch.texts.lengths[row]] = shift[start:]
    assert 0.0 < float((gamma[batch.texts.mask] < 0.8).double().mean()) < 1.0
    expected = gradient_with_shift(policy, value, tables, update, gamma)
    gradient, report = run_update(policy, value, tables, update, passes=passes)
    assert max_difference(gradient, expected) < 1e-10 < largest_entry(expected)
    assert max_difference(expected, gradient_with_shift(policy, value, tables, update, torch.ones_like(gamma))) > 1e-6
    numbers = report.sums.report()
    assert numbers["router/shift_mean"] == pytest.approx(float(gamma[batch.texts.mask].mean()), abs=1e-9)
    assert numbers["router/floored"] == pytest.approx(float((gamma[batch.texts.mask] < 0.8).double().mean()))


def gradient_with_shift(
    policy: Policy, value: Algorithm, tables: Tables, update: Update, gamma: Tensor
) -> dict[str, Tensor]:
    """The gradient in one graph with these `gamma`."""
    rows = update.rows
    logprobs, _, _ = plain_tables(policy, tables.texts, rows.tolist())
    assert tables.advantages is not None and tables.old_logprobs is not None
    outcome = legato.loss(
        value,
        logprobs=logprobs,
        old_logprobs=tables.old_logprobs[rows],
        advantages=tables.advantages[rows, 0],
        mask=tables.texts.mask[rows],
        group=tables.texts.group[rows],
        router_shift=gamma[rows],
    )
    outcome.loss.backward()
    return gradients(policy)


def test_rspo_is_gmpo_before_anything_has_moved() -> None:
    policy, batch = exact_policy(), batch_by_hand()
    update = one_update(batch)
    gradients = []
    for name in ("rspo", "gmpo"):
        value = legato.algorithm(name)
        gradients.append(run_update(policy, value, tables_of(policy, value, batch, [update]), update)[0])
    assert (
        all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[0]) and largest_entry(gradients[0]) > 1e-4
    )
