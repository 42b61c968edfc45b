"""The anchor: old log-probs equal those of the first update to the bit, and when the first update needs none."""

from dataclasses import replace

import pytest
import torch

import legato
from legato.policy.model.reference import Reference
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.policy.policy import Policy
from legato.training.anchor import anchor, first_update_anchors_itself, needs_reference
from legato.training.plan import plan
from legato.training.tables import Tables
from legato.training.update import count_update, silent_rows, update_gradient
from tests.policy.exact import family, plain_tables, policy_of
from tests.training.steps import batch_by_hand, largest_entry, max_difference, move_weights, prepare_tables, trainer_gradient

CPU = torch.device("cpu")


def float32_policy(experts: int = 0, packing: bool = True) -> Policy:
    words = character_tokenizer()
    shape = TinyShape(hidden=32, heads=2, experts=experts or 8)
    model = tiny_model(shape, vocabulary=len(words), seed=0, mixture=experts > 0)
    return Policy(model=model, tokenizer=words, name="tiny", packing=packing)


def float32_batch():  # type: ignore[no-untyped-def]
    batch = batch_by_hand(groups=6, each=4)
    return replace(
        batch,
        sampler_logprobs=batch.sampler_logprobs.float(),
        texts=replace(batch.texts, temperature=batch.texts.temperature.float()),
    )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("tokens_per_pack", [20, 60, 10**6])
def test_anchored_in_the_same_packs_the_first_ratio_is_exactly_1(tokens_per_pack: int, experts: int, packing: bool) -> None:
    policy, batch = float32_policy(experts, packing), float32_batch()
    updates = plan(batch.texts, updates=2, epochs=1, tokens_per_pack=tokens_per_pack, seed=0, packing=packing)
    tables = anchor(Tables.from_batch(batch, CPU), policy, None, updates, choice="recompute", skip_first=False)
    assert tables.old_logprobs is not None
    for update in updates:
        for rows in update.micro_batches:
            with policy.accumulate_gradient(tables.texts, rows) as forward:
                assert forward.hidden.requires_grad
                for piece in forward.pieces():
                    new = piece.channels.logprobs
                    assert torch.equal(new, tables.old_logprobs[piece.rows, : new.shape[1]])


@pytest.mark.parametrize("passes", [1, 2])
def test_the_first_update_reports_ratios_of_exactly_1_and_clips_nothing(passes: int) -> None:
    policy, batch, value = float32_policy(), float32_batch(), legato.algorithm("gspo")
    updates = plan(batch.texts, updates=2, epochs=1, tokens_per_pack=40, seed=0, packing=True)
    tables = Tables.from_batch(batch, CPU).with_advantages(value)
    silent = silent_rows(value, tables)
    tables = anchor(tables, policy, None, updates, choice="recompute", skip_first=False, silent=silent)
    counts = count_update(value, tables, updates[0])
    report = update_gradient(policy, value, tables, updates[0], counts, {}, passes=passes, silent=silent)
    metrics = report.sums.report()
    assert metrics["ratio/sequence_mean"] == 1.0 and metrics["ratio/sequence_max"] == 1.0
    assert metrics["clip/sequences"] == 0.0 and metrics["clip/outside_sequences"] == 0.0


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "gmpo", "cispo", "sapo"])
def test_a_first_update_that_anchors_itself_has_the_same_gradient(name: str, passes: int) -> None:
    value = legato.algorithm(name)
    assert first_update_anchors_itself(value, epochs=1)
    policy, batch = policy_of(family("qwen3")), batch_by_hand(groups=8)
    updates = plan(batch.texts, updates=2, epochs=1, tokens_per_pack=30, seed=0, packing=True)
    every = prepare_tables(policy, value, batch, updates)
    later = prepare_tables(policy, value, batch, updates, skip_first=True)
    for update in updates:
        expected, _ = trainer_gradient(policy, value, every, update, passes=passes)
        gradient, _ = trainer_gradient(policy, value, later, update, passes=passes)
        assert largest_entry(expected) > 1e-4
        assert max_difference(gradient, expected) == 0.0
        move_weights(policy, 1e-3)


def test_an_update_after_the_first_is_compared_with_the_policy_before_the_first() -> None:
    value, policy, batch = legato.algorithm("gspo"), policy_of(family("qwen3")), batch_by_hand()
    updates = plan(batch.texts, updates=3, epochs=1, tokens_per_pack=30, seed=0, packing=True)
    with torch.no_grad():
        before, _, _ = plain_tables(policy, Tables.from_batch(batch, CPU).texts, range(len(batch)))
    tables = prepare_tables(policy, value, batch, updates, skip_first=True, move=1e-2)
    assert tables.old_logprobs is not None and tables.anchored is not None
    rows = torch.cat([update.rows for update in updates[1:]])
    gap = (tables.old_logprobs - before)[rows][batch.texts.mask[rows]]
    assert float(gap.abs().max()) < 1e-12
    assert not bool(tables.anchored[updates[0].rows].any())


@pytest.mark.parametrize(
    ("name", "changes", "epochs"),
    [
        ("gspo", {}, 2),
        ("gspo", {"objective.corrections.tis.cap": 2.0}, 1),
        ("reinforce++", {"advantage.reward_kl": 0.1}, 1),
        ("gepo", {}, 1),
        ("ppo", {}, 1),
    ],
)
def test_every_row_is_anchored_where_something_else_reads_the_anchor(name: str, changes: dict, epochs: int) -> None:
    assert not first_update_anchors_itself(legato.algorithm(name, changes), epochs)


def test_only_algorithms_with_a_divergence_need_a_reference() -> None:
    assert not needs_reference(legato.algorithm("gspo")) and not needs_reference(legato.algorithm("ppo"))
    assert needs_reference(legato.algorithm("grpo", {"objective.penalties.kl.beta": 0.1}))
    assert needs_reference(legato.algorithm("reinforce++", {"advantage.reward_kl": 0.1}))


def test_the_reference_stays_where_the_policy_began() -> None:
    policy, batch = policy_of(family("qwen3")), batch_by_hand()
    texts = Tables.from_batch(batch, CPU).texts
    reference, rows = Reference.from_policy(policy), torch.arange(len(batch))
    before = policy.score(texts, rows).logprobs
    move_weights(policy, 0.1)
    assert torch.equal(reference.score(texts, rows).logprobs, before)
    assert not torch.equal(policy.score(texts, rows).logprobs, before)


def test_the_sampler_anchor_uses_the_logprobs_of_the_engine() -> None:
    policy, batch = policy_of(family("qwen3")), batch_by_hand()
    updates = plan(batch.texts, updates=2, epochs=1, tokens_per_pack=30, seed=0, packing=True)
    tables = anchor(Tables.from_batch(batch, CPU), policy, None, updates, choice="sampler", skip_first=True)
    assert tables.old_logprobs is not None and tables.anchored is not None and bool(tables.anchored.all())
    assert torch.equal(tables.old_logprobs[batch.texts.mask], batch.sampler_logprobs[batch.texts.mask])


def test_silent_rows_are_anchored_in_no_pack_and_change_no_other() -> None:
    value, policy, batch = legato.algorithm("gspo"), policy_of(family("qwen3")), batch_by_hand()
    updates = plan(batch.texts, updates=1, epochs=1, tokens_per_pack=30, seed=0, packing=True)
    tables = Tables.from_batch(batch, CPU).with_advantages(value)
    silent = silent_rows(value, tables)
    assert silent is not None
    fewer = anchor(tables, policy, None, updates, choice="recompute", skip_first=False, silent=silent)
    every = anchor(tables, policy, None, updates, choice="recompute", skip_first=False)
    assert fewer.anchored is not None and torch.equal(fewer.anchored, ~silent)
    assert fewer.old_logprobs is not None and every.old_logprobs is not None
    assert float((fewer.old_logprobs - every.old_logprobs)[~silent].abs().max()) < 1e-13


def test_rows_are_silent_only_if_they_cannot_have_a_gradient() -> None:
    batch = batch_by_hand()
    for name, changes in (
        ("grpo", {"objective.penalties.entropy.coefficient": 0.1}),
        ("grpo", {"objective.penalties.kl.beta": 0.1}),
        ("grpo", {"objective.trust.clip-cov.fraction": 0.1}),
    ):
        value = legato.algorithm(name, changes)
        assert silent_rows(value, Tables.from_batch(batch, CPU).with_advantages(value)) is None
    silent = silent_rows(legato.algorithm("gspo"), Tables.from_batch(batch, CPU).with_advantages(legato.algorithm("gspo")))
    assert silent is not None and silent.tolist() == [False] * 3 + [True] * 3 + [False] * 6


def test_the_staleness_of_a_response_does_not_depend_on_how_long_its_neighbours_are() -> None:
    batch = batch_by_hand()
    inside = torch.arange(batch.texts.tokens.shape[1]) < batch.texts.lengths[:, None]
    fresh = replace(batch, version=torch.where(inside, 9, 0))
    value = legato.algorithm("gspo", {"filters.staleness.most": 1})
    tables = Tables.from_batch(fresh, CPU).with_advantages(value)
    written = batch.texts.lengths > 0
    assert tables.keep is not None and tables.keep[written].tolist() == [[1.0]] * int(written.sum())
