"""The invariants I1 to I15 of the specification."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import legato
from tests.proof.batches import batches, examples, keep_fields, reorder_rows
from tests.proof.bridge import assert_rows_close, assert_same, evaluate
from tests.proof.members import MEMBERS, build_member
from tests.reference import metrics
from tests.reference.batch import Batch, Rows

CLIP = "objective.trust.clip"
some = examples(20)
few = examples(6)


def ones(batch: Batch) -> Rows:
    return [[1.0] * len(row) for row in batch.mask]


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in ("gepo", "minirl")])
@few
@given(data=st.data())
def test_i1_on_policy_every_member_is_reinforce_under_its_own_aggregation(name: str, data: st.DataObject) -> None:
    batch = data.draw(batches())
    batch = keep_fields(replace(batch, old=batch.new, roll=batch.new, gamma=ones(batch)), *MEMBERS[name].needs)
    weight = MEMBERS[name].aggregate(batch)
    pushes = [
        [n * a if counted else 0.0 for n, a, counted in zip(*row, strict=True)]
        for row in zip(weight, batch.advantages, batch.mask, strict=True)
    ]
    assert_rows_close(evaluate(build_member(name), batch).coefficients, pushes)


@some
@given(batch=batches())
def test_i2_gspo_token_with_one_advantage_per_row_is_gspo(batch: Batch) -> None:
    batch = keep_fields(batch)
    assert_same(evaluate("gspo-token", batch), evaluate("gspo", batch))


@some
@given(batch=batches(wild=False))
def test_i3_the_sequence_ratio_is_a_ratio_of_perplexities(batch: Batch) -> None:
    batch = keep_fields(replace(batch, advantages=ones(batch)))
    coefficients = evaluate(legato.algorithm("gspo", {"objective.trust": []}), batch).coefficients
    rows = batch.filled_rows()
    for row in rows:
        positions = batch.positions(row)
        old, new = (metrics.perplexity(log_probs[row], positions) for log_probs in (batch.old, batch.new))
        ratio = coefficients[row][positions[0]] * len(positions) * len(rows)
        assert ratio == pytest.approx(old / new, rel=1e-12)


@some
@given(batch=batches(wild=False))
def test_i4_gmpo_without_a_clip_is_gspo_without_a_clip(batch: Batch) -> None:
    batch = keep_fields(batch)
    unclipped = [evaluate(legato.algorithm(name, {"objective.trust": []}), batch) for name in ("gmpo", "gspo")]
    assert_same(*unclipped)


@some
@given(batch=batches(wild=False))
def test_i5_with_one_token_per_row_gspo_is_grpo(batch: Batch) -> None:
    first = [(batch.positions(row) or [-1])[0] for row in range(len(batch.mask))]
    single = [[t == token for t in range(len(row))] for token, row in zip(first, batch.mask, strict=True)]
    batch = keep_fields(replace(batch, mask=single))
    band = {f"{CLIP}.low": 0.1, f"{CLIP}.high": 0.15}
    assert_same(*[evaluate(legato.algorithm(name, band), batch) for name in ("gspo", "grpo")])


@some
@given(batch=batches())
def test_i6_rspo_without_a_router_shift_is_gmpo(batch: Batch) -> None:
    shifted = keep_fields(replace(batch, gamma=ones(batch)), "gamma")
    assert_same(evaluate("rspo", shifted), evaluate("gmpo", keep_fields(batch)))


@some
@given(batch=batches())
def test_i7_luspo_is_gspo_times_the_length_of_the_row(batch: Batch) -> None:
    batch = keep_fields(batch)
    band = {f"{CLIP}.low": 2e-3, f"{CLIP}.high": 2.5e-3}
    luspo, gspo = (evaluate(legato.algorithm(name, band), batch) for name in ("luspo", "gspo"))
    lengths = [len(batch.positions(row)) for row in range(len(batch.mask))]
    scaled = [[length * entry for entry in row] for length, row in zip(lengths, gspo.coefficients, strict=True)]
    assert_rows_close(luspo.coefficients, scaled)


@some
@given(batch=batches(wild=False))
def test_i8_the_mask_form_has_the_gradient_of_the_clip(batch: Batch) -> None:
    overrides = {
        "objective.corrections": [],
        "objective.trust.mask.low": 0.2,
        "objective.trust.mask.high": 0.28,
        "aggregate": "group-token-mean",
    }
    masked = evaluate(legato.algorithm("minirl", overrides), keep_fields(batch))
    assert_rows_close(masked.coefficients, evaluate("dapo", keep_fields(batch)).coefficients)


@pytest.mark.parametrize("level", ["token", "sequence", "product"])
@some
@given(batch=batches())
def test_i9_a_weight_without_bounds_is_the_decoupled_weight(level: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    bounds = {"tis": {"cap": math.inf}, "icepop": {"floor": 0.0, "cap": math.inf}, "decoupled": {}}
    tis, icepop, decoupled = (
        evaluate(
            legato.algorithm(
                "dapo", {f"objective.corrections.{part}.{k}": v for k, v in {"level": level, **values}.items()}
            ),
            batch,
        )
        for part, values in bounds.items()
    )
    assert_same(tis, decoupled)
    assert_same(icepop, decoupled)


@some
@given(batch=batches(wild=False))
def test_i10_unclipped_the_bypass_gradient_is_the_decoupled_one(batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    bypass = legato.algorithm("dapo", {"objective.trust": [], "objective.ratio.anchor": "sampler"})
    decoupled = legato.algorithm("dapo", {"objective.trust": [], "objective.corrections.decoupled.level": "token"})
    assert_same(evaluate(bypass, batch), evaluate(decoupled, batch))


@pytest.mark.parametrize("name", MEMBERS)
@few
@given(data=st.data())
def test_i11_the_order_of_rows_changes_nothing(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    order = data.draw(st.permutations(range(len(batch.mask))))
    whole, mixed = evaluate(build_member(name), batch), evaluate(build_member(name), reorder_rows(batch, order))
    assert_same(mixed, replace(whole, coefficients=[whole.coefficients[row] for row in order]))


@pytest.mark.parametrize("name", MEMBERS)
@few
@given(data=st.data())
def test_i11_columns_of_padding_change_nothing(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    columns, left = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    fillers = {"mask": False, "turn": -1}
    wide = {}
    for field, rows in vars(batch).items():
        if rows is not None and field != "group":
            padding = [fillers.get(field, math.nan)] * columns
            wide[field] = [padding + row if left else row + padding for row in rows]
    narrow = evaluate(build_member(name), batch)
    padding = [0.0] * columns
    stretched = [padding + row if left else row + padding for row in narrow.coefficients]
    assert_same(evaluate(build_member(name), replace(batch, **wide)), replace(narrow, coefficients=stretched))


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "ppo"])
@few
@given(data=st.data())
def test_i12_loss_and_gradient_are_linear_in_the_size_of_the_advantages(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    larger = replace(batch, advantages=[[3.7 * entry for entry in row] for row in batch.advantages])
    once, more = evaluate(build_member(name), batch), evaluate(build_member(name), larger)
    assert more.loss == pytest.approx(3.7 * once.loss, rel=1e-10, abs=1e-10)
    assert_rows_close(more.coefficients, [[3.7 * entry for entry in row] for row in once.coefficients])


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "ppo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_i13_equal_rewards_give_no_gradient(name: str, reward: float) -> None:
    batch = keep_fields(equal_lengths(), *MEMBERS[name].needs)
    group = torch.tensor(batch.group)
    mask = torch.tensor(batch.mask)
    rewards = torch.full((len(batch.group),), reward, dtype=torch.float64)
    advantages = legato.advantages(build_member(name), rewards=rewards, group=group, mask=mask).advantages
    evaluation = evaluate(build_member(name), batch, advantages=advantages)
    assert evaluation.loss == 0.0
    assert not any(entry for row in evaluation.coefficients for entry in row)


def equal_lengths() -> Batch:
    """Six rows in two groups, off policy everywhere."""
    shift = [[0.3 * math.sin(7 * row + 3 * t) for t in range(4)] for row in range(6)]
    old = [[-1.0 - 0.4 * math.cos(5 * row + t) for t in range(4)] for row in range(6)]
    new = [[o + s for o, s in zip(*pair, strict=True)] for pair in zip(old, shift, strict=True)]
    return Batch(
        new=new,
        old=old,
        roll=[[o - 0.1 for o in row] for row in old],
        gamma=[[0.9] * 4] * 6,
        turn=[[0, 0, 1, 1]] * 6,
        mask=[[True] * 4] * 6,
        advantages=[[0.0] * 4] * 6,
        group=[0, 0, 0, 1, 1, 1],
    )


@some
@given(batch=batches("token", wild=False))
def test_i14_a_wide_soft_gate_or_weight_cap_is_the_unclipped_ratio(batch: Batch) -> None:
    batch = keep_fields(batch)
    gates = {"objective.trust.soft-gate.tau_positive": 1e-4, "objective.trust.soft-gate.tau_negative": 1e-4}
    plain = evaluate(legato.algorithm("grpo", {"objective.trust": []}), batch, "token")
    soft = evaluate(legato.algorithm("sapo", gates), batch, "token")
    assert_rows_close(soft.coefficients, plain.coefficients, relative=1e-5, absolute=1e-9)
    plain = evaluate(legato.algorithm("dapo", {"objective.trust": []}), batch, "token")
    capped = evaluate(legato.algorithm("cispo", {"objective.trust.weight-clip.cap": 1e9}), batch, "token")
    assert_rows_close(capped.coefficients, plain.coefficients)


@pytest.mark.parametrize("name", MEMBERS)
@few
@given(data=st.data())
def test_i15_values_at_masked_tokens_do_not_matter(name: str, data: st.DataObject) -> None:
    batch = keep_fields(data.draw(batches()), *MEMBERS[name].needs)
    number = data.draw(st.floats(width=32))
    other = {}
    for field, rows in vars(batch).items():
        if rows is not None and field not in ("mask", "group", "turn"):
            other[field] = [
                [entry if counted else number for entry, counted in zip(*pair, strict=True)]
                for pair in zip(rows, batch.mask, strict=True)
            ]
    left, right = evaluate(build_member(name), batch), evaluate(build_member(name), replace(batch, **other))
    assert left.loss == right.loss
    assert left.coefficients == right.coefficients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(20))
def test_gspo_token_equals_gspo_on_several_turns_to_the_bit(seed: int, dtype: torch.dtype) -> None:
    """Tool tokens between turns, equal advantages: the same bits of loss, coefficients and gradient."""
    random = torch.Generator().manual_seed(seed)
    width = 14 + seed
    mask = torch.rand(6, width, generator=random) > 0.3
    mask[:, 0], mask[4, :3], mask[5] = True, False, seed % 2 == 0
    turn = torch.where(mask, (~mask).cumsum(1), -1)
    old = -torch.rand(6, width, generator=random, dtype=dtype)
    new = old + 1e-3 * torch.randn(6, width, generator=random, dtype=dtype)
    advantages = torch.randn(6, generator=random, dtype=dtype)

    def compute(name: str, signal: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs = new.clone().requires_grad_()
        outcome = legato.loss(name, logprobs=logprobs, old_logprobs=old, mask=mask, turn=turn, advantages=signal)
        outcome.loss.backward()
        assert logprobs.grad is not None
        return outcome.loss.detach(), outcome.coefficients, logprobs.grad

    whole = compute("gspo", advantages)
    assert bool((whole[1] != 0).any())
    for spread in (advantages, advantages[:, None].expand(6, width).contiguous()):
        assert all(map(torch.equal, whole, compute("gspo-token", spread)))


def test_an_infinite_ratio_of_gspo_token_has_an_infinite_loss() -> None:
    new, old = torch.zeros(2, 3), torch.tensor([[-2e3] * 3, [0.0] * 3])
    advantages = torch.tensor([[-1.0] * 3, [1.0, 0.5, 1.0]])
    outcome = legato.loss("gspo-token", logprobs=new, old_logprobs=old, mask=torch.ones(2, 3), advantages=advantages)
    assert outcome.loss.item() == math.inf
