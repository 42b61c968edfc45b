"""The trainer's gradient is that of the objective's surrogate loss in one float64 graph over the whole update."""

from typing import Any

import pytest
import torch

import legato
from legato.algorithms.algorithm import Algorithm
from legato.core.outcome import Outcome
from legato.core.scope import Scope
from legato.core.signals import Signals
from legato.policy.model.adapters import Lora
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.training.plan import plan
from legato.training.tables import needs
from legato.training.update import silent_rows
from tests.policy.exact import Words, family, plain_tables
from tests.training.steps import (
    WHOLE,
    batch_by_hand,
    gradients,
    graph_gradient,
    largest_entry,
    max_difference,
    move_weights,
    one_update,
    prepare_tables,
    trainer_gradient,
)

KL = {"objective.penalties.kl.beta": 0.3}
ENTROPY = {"objective.penalties.entropy.coefficient": 0.2}
WIDE = {"objective.trust.clip.low": 2e-2, "objective.trust.clip.high": 3e-2}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gspo": ("gspo", WIDE),
    "gspo-auto": ("gspo-auto", {"objective.trust.auto-clip.low": 2e-2, "objective.trust.auto-clip.high": 3e-2}),
    "gspo-token": ("gspo-token", WIDE),
    "turn-gspo": ("turn-gspo", WIDE),
    "gmpo": ("gmpo", {"objective.trust.token-log-clip.log_low": 0.02, "objective.trust.token-log-clip.log_high": 0.02}),
    "luspo": ("luspo", WIDE),
    "gepo": ("gepo", {}),
    "vespo": ("vespo", {}),
    "seq-product": ("seq-product", {}),
    "grpo": ("grpo", {"objective.trust.clip.low": 0.03, "objective.trust.clip.high": 0.03}),
    "grpo with a reference": ("grpo", KL),
    "grpo with an entropy bonus": ("grpo", ENTROPY),
    "gspo with a reference and an entropy bonus": ("gspo", {**WIDE, **KL, **ENTROPY}),
    "dr-grpo": ("dr-grpo", {"aggregate.constant": 9}),
    "dapo": ("dapo", {}),
    "cispo": ("cispo", {}),
    "sapo": ("sapo", {}),
    "ppo": ("ppo", {}),
    "rloo": ("rloo", {}),
    "reinforce++ with a divergence inside the reward": ("reinforce++", {"advantage.reward_kl": 0.1}),
    "grpo with clip-cov": ("grpo", {"objective.trust.clip-cov.fraction": 0.1, "objective.trust.clip-cov.low": 0.0}),
    "grpo with kl-cov": ("grpo", {"objective.penalties.kl-cov.fraction": 0.2}),
    "grpo on the entropic tokens": ("grpo", {"objective.trust.high-entropy.fraction": 0.5}),
    "bapo": ("bapo", {}),
    "gspo corrected for the engine": ("gspo", {**WIDE, "objective.corrections.tis.cap": 1.5}),
    "gspo rejecting, divided by the kept": (
        "gspo",
        {
            **WIDE,
            "objective.corrections.geo-rejection.floor": 0.1,
            "objective.corrections.geo-rejection.cap": 0.6,
            "aggregate.denominator": "kept",
        },
    ),
    "an entropy target": ("grpo", {"objective.penalties.adaptive-entropy.target": 9.0}),
}


def algorithm(name: str) -> Algorithm:
    base, changes = ALGORITHMS[name]
    return legato.algorithm(base, changes)


def exact_policy(
    value: Algorithm, kind: str = "qwen3", *, packing: bool = True, checkpointing: bool = False, lora: bool = False
) -> Policy:
    loading = Loading(
        dtype="float64",
        device="cpu",
        packing=packing,
        gradient_checkpointing=checkpointing,
        lora=Lora(rank=3, alpha=5.0) if lora else None,
    )
    policy = load_policy(family(kind), loading, tokenizer=Words(), value_head="values" in needs(value))
    if lora:
        # Fresh adapters are 0 on one side, and half of their gradients with them.
        for parameter in policy.parameters().values():
            parameter.data = parameter.data.double()
        move_weights(policy, 0.1, seed=11)
    if policy.value_head is not None:
        move_weights(policy, 0.02, seed=12)
    return policy


def difference(
    value: Algorithm, policy: Policy, *, passes: int, tokens_per_pack: int = WHOLE, updates: int = 1, seed: int = 0
) -> float:
    """The largest difference of any gradient entry over all updates of a step; asserts that no gradient is 0."""
    batch = batch_by_hand(seed)
    step = plan(batch.texts, updates=updates, epochs=1, tokens_per_pack=tokens_per_pack, seed=2, packing=policy.packing)
    tables = prepare_tables(policy, value, batch, step, move=3e-3, old_from=1e-2)
    worst = 0.0
    for update in step:
        expected = graph_gradient(policy, value, tables, update.rows.tolist())
        gradient, report = trainer_gradient(policy, value, tables, update, passes=passes)
        assert report.passes == (2 if value.scope is Scope.UPDATE else passes)
        assert largest_entry(expected) > 1e-4
        worst = max(worst, max_difference(gradient, expected))
    return worst


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_of_every_algorithm_is_that_of_its_loss_in_one_graph(name: str, passes: int) -> None:
    value = algorithm(name)
    assert difference(value, exact_policy(value), passes=passes, tokens_per_pack=30) < 1e-10


@pytest.mark.parametrize(("tokens_per_pack", "again"), [(WHOLE, 0), (17, 1)])
def test_the_objective_is_evaluated_again_for_metrics_only_where_an_update_has_several_pieces(
    tokens_per_pack: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, rows, evaluate = algorithm("gspo"), list[int](), Algorithm.evaluate

    def count_rows(self: Algorithm, signals: Signals, *rest: Any) -> Outcome:
        rows.append(len(signals.logprobs))
        return evaluate(self, signals, *rest)

    policy, batch = exact_policy(value), batch_by_hand(0)
    update = one_update(batch, tokens_per_pack)
    tables = prepare_tables(policy, value, batch, [update], move=3e-3, old_from=1e-2)
    monkeypatch.setattr(Algorithm, "evaluate", count_rows)
    trainer_gradient(policy, value, tables, update, passes=1)
    assert sum(rows) == (1 + again) * len(update.rows)
    assert len(rows) > 1 or not again


@pytest.mark.parametrize("tokens_per_pack", [1, 17, WHOLE])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["gspo", "dapo", "grpo with clip-cov"])
def test_no_micro_batching_changes_the_gradient(name: str, packing: bool, tokens_per_pack: int) -> None:
    value = algorithm(name)
    policy = exact_policy(value, packing=packing)
    assert difference(value, policy, passes=1, tokens_per_pack=tokens_per_pack, updates=2) < 1e-10


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["gspo", "gspo with a reference and an entropy bonus", "ppo"])
def test_recomputing_layers_does_not_change_the_gradient(name: str, passes: int, packing: bool) -> None:
    value = algorithm(name)
    policy = exact_policy(value, packing=packing, checkpointing=True)
    assert policy.body.is_gradient_checkpointing
    assert difference(value, policy, passes=passes, tokens_per_pack=25) < 1e-10


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["gspo", "grpo with a reference", "ppo"])
def test_the_gradient_of_adapters_is_exact_and_nothing_else_has_one(name: str, packing: bool, checkpointing: bool) -> None:
    value = algorithm(name)
    policy = exact_policy(value, packing=packing, checkpointing=checkpointing, lora=True)
    assert all("lora_" in key or key.startswith("value_head.") for key in policy.parameters())
    assert len([key for key in policy.parameters() if "lora_" in key]) == 2 * 7 * 2
    assert difference(value, policy, passes=2, tokens_per_pack=25) < 1e-10
    assert all(p.grad is None for p in policy.model.parameters())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["qwen3-moe", "gemma2", "gpt-oss"])
def test_the_gradient_is_exact_for_experts_windows_soft_caps_and_sinks(kind: str, passes: int) -> None:
    value = algorithm("gspo with a reference and an entropy bonus")
    assert difference(value, exact_policy(value, kind), passes=passes, tokens_per_pack=35) < 1e-10


def test_the_gradient_of_gspo_is_that_of_the_paper_written_out() -> None:
    value = algorithm("gspo")
    policy, batch = exact_policy(value), batch_by_hand()
    update = one_update(batch, 30)
    tables = prepare_tables(policy, value, batch, [update], move=3e-3)
    gradient, _ = trainer_gradient(policy, value, tables, update, passes=1)

    new, _, _ = plain_tables(policy, tables.texts, range(len(batch)))
    rewards = batch.rewards.reshape(4, 3)
    apart = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0, keepdim=True).clamp(min=1e-12)
    assert tables.old_logprobs is not None and tables.advantages is not None
    advantages = tables.advantages[:, 0]
    assert torch.allclose(advantages, apart.reshape(-1), rtol=1e-4, atol=1e-9)
    terms, clipped = [], 0
    present = [row for row in range(len(batch)) if batch.texts.mask[row].any()]
    for row in present:
        here = batch.texts.mask[row]
        s = (new[row, here] - tables.old_logprobs[row, here]).mean().exp()
        a = advantages[row]
        terms.append(torch.minimum(s * a, s.clamp(1 - 2e-2, 1 + 3e-2) * a))
        clipped += bool(terms[-1] != s * a)
    assert 0 < clipped < len(present) < len(batch)
    (-torch.stack(terms).sum() / len(present)).backward()
    assert max_difference(gradient, gradients(policy)) < 1e-12


def test_the_gradient_of_grpo_with_a_reference_is_that_of_the_paper_written_out() -> None:
    value = algorithm("grpo with a reference")
    policy, batch = exact_policy(value), batch_by_hand(3)
    update = one_update(batch, 30)
    tables = prepare_tables(policy, value, batch, [update], move=3e-3, old_from=2e-2)
    gradient, _ = trainer_gradient(policy, value, tables, update, passes=2)

    new, _, _ = plain_tables(policy, tables.texts, range(len(batch)))
    assert tables.old_logprobs is not None and tables.ref_logprobs is not None and tables.advantages is not None
    total, present = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(batch)):
        here = batch.texts.mask[row]
        if here.any():
            present += 1
            w = (new[row, here] - tables.old_logprobs[row, here]).exp()
            a = tables.advantages[row, 0]
            gap = tables.ref_logprobs[row, here] - new[row, here]
            total = total - (torch.minimum(w * a, w.clamp(0.8, 1.2) * a) - 0.3 * (gap.exp() - gap - 1)).mean()
    (total / present).backward()
    assert max_difference(gradient, gradients(policy)) < 1e-12


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["gspo", "dapo", "cispo", "gepo", "gmpo", "gspo corrected for the engine"])
def test_leaving_out_rows_that_cannot_have_a_gradient_changes_nothing(name: str, passes: int) -> None:
    value = algorithm(name)
    policy, batch = exact_policy(value), batch_by_hand()
    update = one_update(batch, 30)
    tables = prepare_tables(policy, value, batch, [update], move=3e-3)
    silent = silent_rows(value, tables)
    assert silent is not None and silent.any() and not silent.all()
    every, _ = trainer_gradient(policy, value, tables, update, passes=passes)
    fewer, report = trainer_gradient(policy, value, tables, update, passes=passes, silent=silent)
    assert report.silent == int(silent.sum()) and report.rows == len(batch)
    assert max_difference(every, fewer) < 1e-12


def test_clipped_rows_are_skipped_by_the_second_pass_and_counted() -> None:
    value = legato.algorithm("gspo")
    policy, batch = exact_policy(value), batch_by_hand()
    update = one_update(batch, 30)
    tables = prepare_tables(policy, value, batch, [update], move=1e-3)
    one, first = trainer_gradient(policy, value, tables, update, passes=1)
    two, second = trainer_gradient(policy, value, tables, update, passes=2)
    # Three rows of the flat group and the empty one have no gradient by themselves.
    assert first.without_gradient == second.without_gradient > 4
    assert max_difference(one, two) < 1e-12


@pytest.mark.parametrize("passes", [1, 2])
def test_an_update_in_which_everything_is_clipped_has_no_gradient(passes: int) -> None:
    value = legato.algorithm("gspo", {"objective.trust.clip.low": 0.0, "objective.trust.clip.high": 0.0})
    policy, batch = exact_policy(value), batch_by_hand()
    update = one_update(batch, 30)
    tables = prepare_tables(policy, value, batch, [update])
    with torch.no_grad():
        # Each response moves the way its advantage pushes.
        assert tables.old_logprobs is not None and tables.advantages is not None
        tables.old_logprobs.sub_(0.1 * tables.advantages.sign())
    gradient, report = trainer_gradient(policy, value, tables, update, passes=passes)
    assert largest_entry(gradient) == 0.0 and report.without_gradient == len(batch)


@pytest.mark.parametrize("passes", [1, 2])
def test_an_update_of_silent_rows_alone_has_no_gradient(passes: int) -> None:
    value = algorithm("gspo")
    policy, batch = exact_policy(value), batch_by_hand()
    update = one_update(batch)
    tables = prepare_tables(policy, value, batch, [update])
    gradient, report = trainer_gradient(
        policy, value, tables, update, passes=passes, silent=torch.ones(12, dtype=torch.bool)
    )
    assert largest_entry(gradient) == 0.0 and report.silent == 12 and report.without_gradient == 0


def test_the_gradient_is_added_to_what_the_parameters_hold() -> None:
    value = algorithm("gspo")
    policy, batch = exact_policy(value), batch_by_hand()
    update = one_update(batch)
    tables = prepare_tables(policy, value, batch, [update], move=3e-3)
    alone, _ = trainer_gradient(policy, value, tables, update, passes=1)
    for parameter in policy.parameters().values():
        parameter.grad = torch.ones_like(parameter)
    both, _ = trainer_gradient(policy, value, tables, update, passes=1)
    assert max_difference({name: g + 1 for name, g in alone.items()}, both) < 1e-14
