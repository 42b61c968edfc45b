"""An update may be cut into micro-batches anywhere: with the counts of the whole, the parts add up to the whole."""

import math
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import legato
from tests.proof.batches import batches, examples, keep_fields, reorder_rows
from tests.proof.bridge import advantage_tensor, assert_rows_close, assert_same, count, evaluate
from tests.proof.members import MEMBERS, SPLITTABLE, build_member
from tests.reference.batch import Batch

some = examples(10)
few = examples(6)

# Parts on hosts that must split as well: (host, overrides, fields besides).
WITH_PARTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dapo with kl": ("dapo", {"objective.penalties.kl.beta": 0.1}, ("ref",)),
    "gspo with an entropy bonus": ("gspo", {"objective.penalties.entropy.coefficient": 0.1}, ("entropy",)),
    "dapo with tis": ("dapo", {"objective.corrections.tis.level": "token"}, ("roll",)),
    "gspo with icepop": ("gspo", {"objective.corrections.icepop.level": "sequence"}, ("roll",)),
    "grpo with opsm": ("grpo", {"objective.trust.opsm.threshold": 0.1}, ("roll",)),
    "grpo with trm": ("grpo", {"objective.trust.trm.max_threshold": 0.3}, ("roll",)),
    "dapo with kept denominators": (
        "dapo",
        {"objective.corrections.veto.floor": 0.5, "aggregate.denominator": "kept"},
        ("roll",),
    ),
    "gspo with kept denominators": (
        "gspo",
        {
            "objective.corrections.geo-rejection.floor": 0.7,
            "objective.corrections.geo-rejection.cap": 1.3,
            "aggregate.denominator": "kept",
        },
        ("roll",),
    ),
}


def evaluate_in_parts(algorithm: Any, batch: Batch, owner: list[int]) -> tuple[float, dict[int, list[float]]]:
    """The summed loss and the coefficients of each row, row r being evaluated in micro-batch owner[r]."""
    cuts = [[row for row in range(len(owner)) if owner[row] == part] for part in sorted(set(owner))]
    pieces = [reorder_rows(batch, rows) for rows in cuts]
    counts = reduce(add, [count(algorithm, piece) for piece in pieces])
    loss, coefficients = 0.0, {}
    for rows, piece in zip(cuts, pieces, strict=True):
        evaluation = evaluate(algorithm, piece, counts=counts)
        loss += evaluation.loss
        coefficients.update(zip(rows, evaluation.coefficients, strict=True))
    return loss, coefficients


def assert_parts_make_the_whole(algorithm: Any, batch: Batch, owner: list[int]) -> None:
    whole = evaluate(algorithm, batch)
    loss, coefficients = evaluate_in_parts(algorithm, batch, owner)
    size = max(1.0, abs(whole.loss), *(abs(entry) for row in whole.coefficients for entry in row))
    assert loss == pytest.approx(whole.loss, abs=1e-10 * size)
    assert_rows_close([coefficients[row] for row in range(len(owner))], whole.coefficients)


@pytest.mark.parametrize("name", SPLITTABLE)
@some
@given(data=st.data())
def test_any_split_gives_the_loss_and_coefficients_of_the_whole(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    rows = len(batch.mask)
    owner = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    assert_parts_make_the_whole(build_member(name), batch, owner)


@pytest.mark.parametrize("case", WITH_PARTS)
@some
@given(data=st.data())
def test_any_split_holds_with_parts_added(case: str, data: st.DataObject) -> None:
    name, overrides, needs = WITH_PARTS[case]
    batch = keep_fields(data.draw(batches()), *needs)
    rows = len(batch.mask)
    owner = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    assert_parts_make_the_whole(legato.algorithm(name, overrides), batch, owner)


@pytest.mark.parametrize("name", SPLITTABLE)
@few
@given(data=st.data())
def test_one_row_at_a_time_is_exact_although_groups_straddle_the_split(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    batch = replace(batch, group=[0] * len(batch.mask))
    assert_parts_make_the_whole(build_member(name), batch, list(range(len(batch.mask))))


@pytest.mark.parametrize("name", SPLITTABLE)
@few
@given(data=st.data())
def test_the_counts_of_the_call_itself_change_nothing(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    counts = count(build_member(name), batch)
    assert_same(evaluate(build_member(name), batch, counts=counts), evaluate(build_member(name), batch))


def test_the_two_group_example_splits_exactly() -> None:
    """Token losses [1, 1], [2, 2, 2, 2] and [3]: 13/7, 7/3, 2 and 13/3, whole and as micro-batches {1, 2}, {3}."""
    zeros = [[0.0] * 4] * 3
    mask = [[True, True, False, False], [True] * 4, [True, False, False, False]]
    batch = Batch(new=zeros, old=zeros, mask=mask, advantages=[[-1.0] * 4, [-2.0] * 4, [-3.0] * 4], group=[0, 0, 1])
    sizes = {"token-mean": 13 / 7, "group-token-mean": 7 / 3, "sequence-mean": 2.0, "sequence-sum": 13 / 3}
    for aggregate, loss in sizes.items():
        algorithm = legato.algorithm("grpo", {"aggregate": aggregate})
        assert evaluate(algorithm, batch).loss == pytest.approx(loss, abs=1e-12)
        assert evaluate_in_parts(algorithm, batch, [0, 0, 1])[0] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("name", MEMBERS)
@some
@given(data=st.data())
def test_rows_that_share_a_rollout_id_are_one_rollout(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    pieces, rollout, origin = split_rows(batch, data)
    whole = evaluate(build_member(name), batch)
    advantages = advantage_tensor(batch, "sequence", torch.float64)[rollout]
    parts = evaluate(build_member(name), pieces, rollout=torch.tensor(rollout), advantages=advantages)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-10)
    rebuilt = [[0.0] * len(row) for row in batch.mask]
    for piece, (row, start) in enumerate(origin):
        for t, counted in enumerate(pieces.mask[piece]):
            if counted:
                rebuilt[row][start + t] = parts.coefficients[piece][t]
    assert_rows_close(rebuilt, whole.coefficients)


def split_rows(batch: Batch, data: st.DataObject) -> tuple[Batch, list[int], list[tuple[int, int]]]:
    """Some rows cut in two; the pieces, the rollout id of each and where each came from."""
    width = len(batch.mask[0])
    bounds = [data.draw(st.integers(0, width - 1)) for _ in batch.mask]
    ranges = [
        (row, start, end) for row, bound in enumerate(bounds) for start, end in ((0, bound), (bound, width)) if start < end
    ]
    fillers = {"mask": False, "turn": -1}
    pieces = {}
    for field, rows in vars(batch).items():
        if field == "group":
            pieces[field] = [batch.group[row] for row, _, _ in ranges]
        elif rows is not None:
            filler = fillers.get(field, math.nan)
            pieces[field] = [rows[row][a:b] + [filler] * (width - (b - a)) for row, a, b in ranges]
    return replace(batch, **pieces), [row for row, _, _ in ranges], [(row, a) for row, a, _ in ranges]


@pytest.mark.parametrize("name", SPLITTABLE)
@few
@given(data=st.data())
def test_rollouts_of_several_rows_split_as_exactly(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    pieces, rollout, _ = split_rows(batch, data)
    advantages = advantage_tensor(batch, "sequence", torch.float64)
    owner = data.draw(st.lists(st.integers(0, 1), min_size=len(batch.mask), max_size=len(batch.mask)))
    algorithm = build_member(name)
    parts = []
    for part in sorted(set(owner)):
        rows = [row for row in range(len(rollout)) if owner[rollout[row]] == part]
        parts.append((reorder_rows(pieces, rows), torch.tensor([rollout[row] for row in rows])))
    counts = reduce(add, [count(algorithm, piece, rollout=ids) for piece, ids in parts])
    losses = [
        evaluate(algorithm, piece, rollout=ids, advantages=advantages[ids], counts=counts).loss for piece, ids in parts
    ]
    assert math.fsum(losses) == pytest.approx(evaluate(algorithm, batch).loss, rel=1e-10, abs=1e-9)
