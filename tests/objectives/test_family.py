"""Every named algorithm equals its reference: loss, gradient and coefficients, on generated updates."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import legato
from tests.proof.batches import batches, channels, examples, keep_fields
from tests.proof.bridge import (
    assert_agrees,
    assert_rows_close,
    assert_same,
    assert_silent_outside,
    evaluate,
    loss,
    signals,
)
from tests.proof.members import MEMBERS, build_member, expected
from tests.reference import aggregation, factors, objectives, penalties
from tests.reference.batch import Batch

FINEST = {name: member.units[-1] for name, member in MEMBERS.items()}


@pytest.mark.parametrize("name", MEMBERS)
@examples(25)
@given(data=st.data())
def test_the_member_equals_its_reference(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    evaluation = evaluate(build_member(name), batch)
    assert_agrees(evaluation, expected(name, batch))
    assert_silent_outside(evaluation, batch)


@pytest.mark.parametrize("name", [name for name, unit in FINEST.items() if unit != "sequence"])
@examples(15)
@given(data=st.data())
def test_the_member_equals_its_reference_with_finer_advantages(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches(FINEST[name])), *MEMBERS[name].needs)
    evaluation = evaluate(build_member(name), batch, FINEST[name])
    assert_agrees(evaluation, expected(name, batch))
    assert_silent_outside(evaluation, batch)


@pytest.mark.parametrize("name", MEMBERS)
@examples(8)
@given(data=st.data())
def test_the_member_equals_its_reference_in_float32(name: str, data: st.DataObject) -> None:
    batch = round_to_float32(keep_fields(data.draw(batches(wild=False)), *MEMBERS[name].needs))
    evaluation = evaluate(build_member(name), batch, dtype=torch.float32)
    assert evaluation.outcome.coefficients.dtype == torch.float32
    assert_agrees(evaluation, expected(name, batch), relative=2e-4, absolute=2e-6)
    assert_silent_outside(evaluation, batch)


def round_to_float32(batch: Batch) -> Batch:
    """The batch with every number as float32 holds it."""
    floats = {name: value for name, value in channels(batch).items() if name not in ("mask", "group", "turn")}
    return replace(batch, **{name: torch.tensor(value, dtype=torch.float32).tolist() for name, value in floats.items()})


@examples(25)
@given(batch=batches())
def test_the_value_coefficients_of_ppo_equal_the_reference(batch: Batch) -> None:
    batch = keep_fields(batch, "values", "old_values", "returns")
    outcome = evaluate(build_member("ppo"), batch).outcome
    _, gradient = penalties.value_loss(batch)
    assert_rows_close(outcome.value_coefficients.tolist(), [[-entry for entry in row] for row in gradient])


@examples(25)
@given(batch=batches())
def test_backward_reaches_the_values(batch: Batch) -> None:
    batch = keep_fields(batch, "values", "old_values", "returns")
    values = torch.tensor(batch.values, dtype=torch.float64, requires_grad=True)
    evaluate(build_member("ppo"), batch, values=values)
    assert_rows_close(values.grad.tolist(), penalties.value_loss(batch)[1])


@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if member.differentiated])
@examples(3)
@given(data=st.data())
def test_gradcheck_agrees_where_the_ratio_is_differentiated(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches(wild=False, filled=True)), *MEMBERS[name].needs)
    keywords = signals(batch)
    mask = keywords["mask"]
    full = torch.where(mask, keywords.pop("logprobs"), torch.zeros(()))

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        logprobs = full.masked_scatter(mask, tokens)
        return loss(build_member(name), logprobs=logprobs, **keywords, metrics=False).loss

    tokens = full[mask].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss_of, (tokens,), eps=1e-7, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MEMBERS)
def test_an_update_without_tokens_is_a_no_op(name: str) -> None:
    rows = [[float("nan")] * 3, [float("inf")] * 3]
    nothing = {field: rows for field in MEMBERS[name].needs if field != "turn"}
    batch = Batch(
        new=rows, old=rows, mask=[[False] * 3] * 2, advantages=rows, group=[0, 0],
        turn=[[-1] * 3] * 2 if "turn" in MEMBERS[name].needs else None, **nothing,
    )  # fmt: skip
    evaluation = evaluate(build_member(name), batch)
    assert evaluation.loss == 0.0
    assert_silent_outside(evaluation, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["gepo", "dapo", "cispo"])
def test_a_group_without_tokens_leaves_the_others_alone(name: str, dtype: torch.dtype) -> None:
    alone = Batch(new=[[-0.4]], old=[[-0.41]], mask=[[True]], advantages=[[1.0]], group=[0])
    nan = float("nan")
    beside = Batch(
        new=[[-0.4], [nan]], old=[[-0.41], [nan]], mask=[[True], [False]], advantages=[[1.0], [nan]], group=[0, 1]
    )  # fmt: skip
    whole = evaluate(name, beside, dtype=dtype)
    assert whole.loss == evaluate(name, alone, dtype=dtype).loss
    assert whole.coefficients[1] == [0.0]


def test_group_means_keep_the_precision_of_the_log_probs() -> None:
    zeros = [[0.0]] * 3
    batch = Batch(new=zeros, old=zeros, mask=[[True]] * 3, advantages=[[1.0], [0.0], [0.0]], group=[0, 1, 2])
    assert evaluate("dapo", batch).loss == pytest.approx(-1 / 3, rel=1e-14)


@pytest.mark.parametrize("name", MEMBERS)
@examples(5)
@given(data=st.data())
def test_coefficients_are_the_same_under_no_grad(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    with torch.no_grad():
        outcome = loss(build_member(name), **signals(batch))
    assert_rows_close(outcome.coefficients.tolist(), evaluate(build_member(name), batch).coefficients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shift", "advantage"), [(1000.0, 1.0), (-1000.0, 1.0), (-1000.0, -1.0)])
@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "gepo"])
def test_a_ratio_beyond_every_exponent_stays_finite_where_it_is_clipped_or_vanishes(
    name: str, shift: float, advantage: float, dtype: torch.dtype
) -> None:
    old = [[-1001.0 if shift > 0 else -1.0] * 2, [-0.3, -0.7]]
    new = [[value + shift for value in old[0]], [-0.2, -0.9]]
    batch = Batch(
        new=new, old=old, roll=old, mask=[[True] * 2] * 2, advantages=[[advantage] * 2, [0.5] * 2], group=[0, 0],
        gamma=[[0.9] * 2] * 2, turn=[[0, 0], [0, 1]], values=old, old_values=old, returns=old,
    )  # fmt: skip
    evaluation = evaluate(build_member(name), keep_fields(batch, *MEMBERS[name].needs), dtype=dtype)
    assert math.isfinite(evaluation.loss)
    assert all(math.isfinite(entry) for row in evaluation.gradient for entry in row)


@examples(10)
@given(batch=batches(), kind=st.sampled_from([torch.int64, torch.float32, torch.uint8]))
def test_a_mask_of_zeros_and_ones_is_a_mask(batch: Batch, kind: torch.dtype) -> None:
    batch = keep_fields(batch)
    assert_same(evaluate("gspo", batch, mask=torch.tensor(batch.mask).to(kind)), evaluate("gspo", batch))


@pytest.mark.parametrize("name", MEMBERS)
@examples(3)
@given(data=st.data())
def test_the_backward_of_a_multiple_is_the_multiple(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    keywords = signals(batch)
    logprobs = keywords.pop("logprobs").requires_grad_()
    outcome = loss(build_member(name), logprobs=logprobs, **keywords, metrics=False)
    (4 * outcome.loss).backward()
    assert_rows_close(logprobs.grad.tolist(), (-4 * outcome.coefficients).tolist())


@pytest.mark.parametrize("divergence", ["total-variation", "kl"])
@pytest.mark.parametrize("anchor", ["sampler", "old"])
@examples(20)
@given(batch=batches("token"))
def test_dppo_masks_by_either_divergence_against_either_anchor(divergence: str, anchor: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    overrides = {
        "objective.ratio.anchor": anchor,
        "objective.trust.divergence-mask.anchor": anchor,
        "objective.trust.divergence-mask.divergence": divergence,
        "objective.trust.divergence-mask.threshold": 0.05,
    }
    factor = factors.divergence_masked_ratios(batch, 0.05, divergence=divergence, anchor=anchor)
    reference = objectives.weighted_log_probs(batch, aggregation.token_mean(batch), factor)
    assert_agrees(evaluate(build_member("dppo", overrides), batch, "token"), reference)


@pytest.mark.parametrize("name", ["reinforce", "rloo"])
@examples(10)
@given(batch=batches())
def test_members_without_a_ratio_need_no_old_logprobs(name: str, batch: Batch) -> None:
    batch = keep_fields(batch)
    keywords = signals(batch)
    del keywords["old_logprobs"]
    outcome = legato.loss(build_member(name), **keywords)
    assert_rows_close(outcome.coefficients.tolist(), [[-e for e in row] for row in expected(name, batch).gradient])
