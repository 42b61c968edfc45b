"""The plan: whole groups, sizes within one, each row once an epoch, packs within their budget."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.policy.layout.packs import pack
from legato.policy.policy import pad_rows
from legato.training.plan import micro_batches, plan
from tests.training.steps import batch_by_hand

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 9))


@given(
    groups=st.integers(2, 9),
    each=st.integers(2, 5),
    updates=st.integers(1, 12),
    epochs=st.integers(1, 3),
    tokens=st.integers(1, 200),
    seed=st.integers(0, 5),
    packing=st.booleans(),
)
def test_every_row_is_in_one_update_of_an_epoch_with_its_whole_group(
    groups: int, each: int, updates: int, epochs: int, tokens: int, seed: int, packing: bool
) -> None:
    batch = batch_by_hand(seed, groups, each)
    planned = plan(batch.texts, updates=updates, epochs=epochs, tokens_per_pack=tokens, seed=seed, packing=packing)
    for epoch in range(epochs):
        of_epoch = [update for update in planned if update.epoch == epoch]
        assert [update.index for update in of_epoch] == list(range(min(updates, groups)))
        rows = torch.cat([update.rows for update in of_epoch])
        assert sorted(rows.tolist()) == list(range(len(batch)))
        sizes = [len(set(batch.texts.group[update.rows].tolist())) for update in of_epoch]
        assert max(sizes) - min(sizes) <= 1
        for update in of_epoch:
            assert len(update.rows) == each * len(set(batch.texts.group[update.rows].tolist()))
            assert sorted(torch.cat(update.micro_batches).tolist()) == update.rows.tolist()


@given(groups=st.integers(2, 6), each=st.integers(2, 6), tokens=st.integers(1, 120), seed=st.integers(0, 9))
def test_a_pack_holds_no_more_tokens_than_allowed_unless_it_is_one_row(
    groups: int, each: int, tokens: int, seed: int
) -> None:
    batch = batch_by_hand(seed, groups, each)
    for rows in micro_batches(batch.texts, range(groups), tokens):
        assert len(rows) == 1 or len(pack(batch.texts, rows).tokens) <= tokens


def test_padded_rows_hold_no_more_tokens_than_allowed_either() -> None:
    batch = batch_by_hand(groups=2, each=20)
    lengths = torch.ones(40, dtype=torch.int64)
    lengths[0] = 9
    texts = replace(batch.texts, lengths=lengths, prompt_lengths=torch.ones(2, dtype=torch.int64))
    for rows in micro_batches(texts, range(2), 60, shared=False):
        tokens, _, _ = pad_rows(pack(texts, rows))
        assert tokens.numel() <= 60


def test_a_group_that_fits_is_not_cut() -> None:
    batch = batch_by_hand(groups=6, each=4)
    largest = max(
        int(batch.texts.prompt_lengths[g] + (batch.texts.lengths[batch.texts.group == g] - 1).clamp(min=0).sum())
        for g in range(6)
    )
    for rows in micro_batches(batch.texts, range(6), largest):
        for group in set(batch.texts.group[rows].tolist()):
            assert set((batch.texts.group == group).nonzero().squeeze(1).tolist()) <= set(rows.tolist())


def test_few_packs_are_made_where_few_are_enough() -> None:
    batch = batch_by_hand(groups=6, each=4)
    assert len(micro_batches(batch.texts, range(6), 10**6)) == 1
    total = len(pack(batch.texts, torch.arange(24)).tokens)
    # First fit by decreasing size never leaves two bins half empty.
    assert len(micro_batches(batch.texts, range(6), total // 2)) <= 4


def test_the_deal_depends_on_the_seed_and_the_epoch_alone() -> None:
    batch = batch_by_hand(groups=8)

    def deal(seed: int, epochs: int = 2) -> list[list[int]]:
        return [
            u.rows.tolist() for u in plan(batch.texts, updates=4, epochs=epochs, tokens_per_pack=99, seed=seed, packing=True)
        ]

    assert deal(1) == deal(1) and deal(1) != deal(2)
    assert deal(1)[:4] != deal(1)[4:] and deal(1, epochs=1) == deal(1)[:4]


def test_more_updates_than_groups_is_one_group_an_update() -> None:
    planned = plan(batch_by_hand(groups=3).texts, updates=8, epochs=1, tokens_per_pack=99, seed=0, packing=True)
    assert len(planned) == 3 and all(len(update.rows) == 3 for update in planned)
