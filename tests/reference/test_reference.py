"""The reference itself: the 39 vectors, the V numbers of the objectives, and finite differences."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from tests.proof.batches import batches, examples
from tests.reference import (
    aggregation,
    corrections,
    factors,
    family,
    metrics,
    objectives,
    penalties,
    ratios,
    selections,
    vectors,
)
from tests.reference.batch import Batch, Result, numerical_gradient
from tests.reference.examples import LENGTHS, VECTORS, batch_v


@pytest.mark.parametrize("name", VECTORS)
def test_the_reference_reproduces_the_vector(name: str) -> None:
    result = vectors.COMPUTED[name]()
    assert result.loss == pytest.approx(VECTORS[name]["loss"], abs=1e-10)
    for computed, printed, length in zip(result.gradient, VECTORS[name]["grad"], LENGTHS, strict=True):
        assert computed[:length] == pytest.approx(printed, abs=1e-10)
        assert computed[length:] == [0.0] * (len(computed) - length)


def test_every_vector_is_covered() -> None:
    assert len(VECTORS) == 39
    assert set(vectors.COMPUTED) == set(VECTORS)


# Differences exist only where the loss itself depends on new through what the gradient differentiates.
DIFFERENTIATED: dict[str, Callable[[Batch], Result]] = {
    **{
        name: member
        for name, member in family.FAMILY.items()
        if name not in ("gspo-token", "cispo", "vespo", "minirl", "dppo", "bapo", "ppo")
    },
    "rs-gspo": vectors.router_shifted_gspo,
    "rs-grpo": vectors.router_shifted_grpo,
    "rspo-v1": vectors.router_shifted_gmpo_after_clip,
    "opsm": vectors.opsm,
    "kl-cov": vectors.kl_cov,
    "bypass": vectors.bypass,
    "kl-k1": lambda batch: penalties.kl(batch, aggregation.token_mean(batch), estimator="k1"),
    "kl-k2": lambda batch: penalties.kl(batch, aggregation.token_mean(batch), estimator="k2"),
    "kl-k3": lambda batch: penalties.kl(batch, aggregation.token_mean(batch), estimator="k3"),
    "kl-ratio-weighted": lambda batch: penalties.kl_ratio_weighted(batch, aggregation.token_mean(batch)),
    "gspo-with-token-tis": lambda batch: objectives.clipped_segments(
        batch,
        aggregation.times(batch, aggregation.sequence_mean(batch), corrections.truncated(batch, "token")),
        ratios.token_log_ratios(batch, limit=None),
        3e-4,
        4e-4,
    ),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.parametrize("shift", [0.0, 0.013, -0.217])
def test_the_gradient_written_by_hand_agrees_with_differences(name: str, shift: float) -> None:
    batch = batch_v()
    batch = replace(batch, new=[[value + shift * math.cos(7 * value) for value in row] for row in batch.new])
    by_hand, by_differences = DIFFERENTIATED[name](batch).gradient, numerical_gradient(DIFFERENTIATED[name], batch)
    for left, right in zip(by_hand, by_differences, strict=True):
        assert left == pytest.approx(right, abs=2e-8)


@pytest.mark.parametrize("name", DIFFERENTIATED)
@examples(6)
@given(batch=batches(wild=False, filled=True))
def test_the_gradient_written_by_hand_agrees_with_differences_on_generated_updates(name: str, batch: Batch) -> None:
    by_hand, by_differences = DIFFERENTIATED[name](batch).gradient, numerical_gradient(DIFFERENTIATED[name], batch, 1e-7)
    size = max(1.0, *(abs(entry) for row in by_hand for entry in row))
    for left, right in zip(by_hand, by_differences, strict=True):
        assert left == pytest.approx(right, abs=1e-6 * size)


def test_a_log_ratio_beyond_the_limit_has_no_gradient() -> None:
    batch = batch_v()
    new = [list(row) for row in batch.new]
    new[3][1] = batch.old[3][1] + 25.0
    batch = replace(batch, new=new)
    for name in ("grpo", "seq-product", "fspo", "sapo", "gmpo"):
        by_hand, by_differences = family.FAMILY[name](batch).gradient, numerical_gradient(family.FAMILY[name], batch)
        assert by_hand[3][1] == 0.0
        assert by_differences[3][1] == pytest.approx(0.0, abs=1e-6)
    assert family.FAMILY["gspo"](batch).gradient[3][1] != 0.0


def test_the_value_loss_agrees_with_differences() -> None:
    values = [[0.7, -0.3, 1.4, 0.2, 0.0], [0.1, 0.9, 0.33, 0, 0], [2.2, -1.1, 0, 0, 0], [0.5, 0.45, 0.4, 0.35, 0.31]]
    batch = replace(
        batch_v(),
        values=values,
        old_values=[[value - 0.31 * math.sin(9 * value) for value in row] for row in values],
        returns=[[0.8, 0.21, -0.4, 0.1, 1.3]] * 4,
    )
    _, by_hand = penalties.value_loss(batch, clip=0.2)
    step = 1e-6
    for row, position in batch.tokens():
        losses = []
        for sign in (1, -1):
            moved = [list(row_values) for row_values in values]
            moved[row][position] += sign * step
            losses.append(penalties.value_loss(replace(batch, values=moved), clip=0.2)[0])
        assert by_hand[row][position] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-8)


def test_the_value_loss_example_of_ppo() -> None:
    batch = Batch(
        new=[[0.0]], old=[[0.0]], mask=[[True]], advantages=[[0.0]], group=[0],
        values=[[0.7]], old_values=[[0.4]], returns=[[1.0]],
    )  # fmt: skip
    assert penalties.value_loss(batch, clip=0.2, coefficient=1.0)[0] == pytest.approx(0.08, abs=1e-12)


def test_token_ratios_of_batch_v() -> None:
    log_ratio = ratios.token_log_ratios(batch_v()).value
    expected = [
        [1.3498588076, 0.9048374180, 1.0512710964, 0.7795799734],
        [0.6376281516, 1.1051709181, 1.0202013400],
        [1.0512710964, 1.1618342427],
        [3.3201169227, 0.9512294245, 1.0202013400, 1.0304545340, 0.9900498337],
    ]
    for row, printed in enumerate(expected):
        assert [math.exp(value) for value in log_ratio[row][: len(printed)]] == pytest.approx(printed, abs=1e-10)


def test_sequence_ratios_are_perplexity_ratios() -> None:
    batch = batch_v()
    sequence = [metrics.sequence_ratio(batch, row) for row in range(4)]
    assert sequence == pytest.approx([1.000250031253, 0.895834135297, 1.105170918076, 1.268709192825], abs=1e-12)
    old = [metrics.perplexity(batch.old[row], batch.positions(row)) for row in range(4)]
    new = [metrics.perplexity(batch.new[row], batch.positions(row)) for row in range(4)]
    assert old == pytest.approx([2.5857096593, 2.3009758909, 1.9155408290, 2.8292170144], abs=1e-10)
    assert new == pytest.approx([2.5850633127, 2.5685289277, 1.7332530179, 2.2299964644], abs=1e-10)
    assert [a / b for a, b in zip(old, new, strict=True)] == pytest.approx(sequence, abs=1e-12)


def test_clip_fractions_of_batch_v() -> None:
    batch = batch_v()
    assert metrics.clipped_tokens(batch, 0.2, 0.2) == 2 / 14
    assert metrics.clipped_tokens(batch, 0.2, 0.28) == 2 / 14
    clipped = metrics.clipped_sequences(batch, 3e-4, 4e-4)
    assert clipped == [1, 2]
    assert sum(LENGTHS[row] for row in clipped) == 5
    assert len(metrics.out_of_band_sequences(batch, 3e-4, 4e-4)) == 3


def test_mask_form_has_the_gradient_of_the_clip_and_another_loss() -> None:
    masked, clipped = vectors.mask_form(batch_v()), family.FAMILY["dapo"](batch_v())
    assert masked.loss == pytest.approx(-0.344927030, abs=1e-9)
    assert clipped.loss == pytest.approx(0.286330749012, abs=1e-10)
    for left, right in zip(masked.gradient, clipped.gradient, strict=True):
        assert left == pytest.approx(right, abs=1e-15)


def test_turn_ratios_of_batch_v() -> None:
    batch = batch_v()
    turns = {}
    for row, segment in batch.segments("turn"):
        log_ratio = [batch.new[row][position] - batch.old[row][position] for position in segment]
        turns.setdefault(row, []).append(math.exp(sum(log_ratio) / len(segment)))
    printed = [
        [1.1051709181, 0.9052899499], [0.6376281516, 1.0618365465], [1.1051709181], [1.7771305269, 1.0134226186],
    ]  # fmt: skip
    for row, expected in enumerate(printed):
        assert turns[row] == pytest.approx(expected, abs=1e-10)


def test_group_expectation_of_batch_v() -> None:
    batch = batch_v()
    expectation = objectives.expected_likelihoods(batch)[0]
    assert expectation == pytest.approx(0.4336922523, abs=1e-10)
    ratio = [objectives.likelihood(batch.new[row], batch.positions(row)) / expectation for row in range(4)]
    assert ratio == pytest.approx([0.8919636418, 0.8977054772, 1.3303207684, 1.0339848172], abs=1e-10)


def test_kernel_weights_of_batch_v() -> None:
    batch = batch_v()
    products = [math.exp(ratios.log_product(batch, row)[0]) for row in range(4)]
    assert products == pytest.approx([1.0010005, 0.7189237, 1.2214028, 3.2870812], abs=1e-7)
    weights = [row[0] for row in factors.kernel_weights(batch)]
    assert weights == pytest.approx([0.9989990, 0.6519108, 0.7678136, 0.3663514], abs=1e-7)


def test_the_soft_gate_amplifies_and_then_fades() -> None:
    def coefficient(ratio: float, advantage: float) -> float:
        batch = Batch(new=[[math.log(ratio)]], old=[[0.0]], mask=[[True]], advantages=[[advantage]], group=[0])
        return -family.sapo(batch).gradient[0][0] / advantage

    for ratio, positive, negative in [(3, 1.26, 1.17), (5, 0.353, 0.291), (10, 0.0049, 0.0031)]:
        assert coefficient(ratio, 1.0) == pytest.approx(positive, rel=0.02)
        assert coefficient(ratio, -1.0) == pytest.approx(negative, rel=0.02)
    assert coefficient(2.060, 1.0) == pytest.approx(1.5747, abs=1e-4)
    assert coefficient(1.992, -1.0) == pytest.approx(1.5363, abs=1e-4)


def test_divergence_mask_of_batch_v_takes_one_token_by_either_divergence() -> None:
    for divergence, threshold in [("total-variation", 0.15), ("kl", 0.05)]:
        factor = factors.divergence_masked_ratios(batch_v(), threshold=threshold, divergence=divergence, anchor="old")
        assert [token for token in batch_v().tokens() if factor[token[0]][token[1]] == 0.0] == [(1, 0)]


def test_off_policy_mask_of_batch_v() -> None:
    assert selections.off_policy_survivors(batch_v(), 0.05, "old") == {0, 2, 3}


def test_covariances_of_batch_v() -> None:
    covariance = selections.covariances(batch_v())
    assert covariance[0][3] == pytest.approx(0.55943, abs=1e-5)
    assert covariance[2][1] == pytest.approx(0.67257, abs=1e-5)
    assert set(selections.top_covariance_tokens(batch_v(), 2)) == {(0, 3), (2, 1)}


def test_router_shift_and_flip_rate_example() -> None:
    old = [[1, 0.5, 0, -0.5], [0.2, 0.9, -0.3, 0.4]]
    new = [[0.8, 0.7, 0.1, -0.5], [0.5, 0.6, -0.3, 0.4]]
    assert ratios.router_shift(old, new, active=2) == pytest.approx(0.839457020769, abs=1e-12)
    assert metrics.expert_flip_rate(old, new, active=2) == 0.25
