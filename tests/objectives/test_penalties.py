"""Penalties equal the reference: they follow the mask and the host's aggregation, never the selections."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import legato
from tests.proof.batches import batches, examples, keep_fields
from tests.proof.bridge import assert_agrees, assert_rows_close, evaluate
from tests.proof.hosts import HOSTS
from tests.reference import corrections, objectives, penalties, selections
from tests.reference.batch import Batch, Result, Rows

SLOT = "objective.penalties"
KL: dict[str, tuple[dict[str, Any], Callable[[Batch, Rows], Result]]] = {
    "k1": (
        {f"{SLOT}.kl.beta": 0.3, f"{SLOT}.kl.estimator": "k1"},
        lambda batch, weight: penalties.kl(batch, weight, 0.3, "k1"),
    ),
    "k2": (
        {f"{SLOT}.kl.beta": 0.3, f"{SLOT}.kl.estimator": "k2"},
        lambda batch, weight: penalties.kl(batch, weight, 0.3, "k2"),
    ),
    "k3": ({f"{SLOT}.kl.beta": 0.3}, lambda batch, weight: penalties.kl(batch, weight, 0.3, "k3")),
    "straight-through": (
        {f"{SLOT}.kl-straight-through.beta": 0.3},
        lambda batch, weight: penalties.kl_straight_through(batch, weight, 0.3),
    ),
    "ratio-weighted": (
        {f"{SLOT}.kl-ratio-weighted.beta": 0.3},
        lambda batch, weight: penalties.kl_ratio_weighted(batch, weight, 0.3),
    ),
    "ratio-weighted-k2": (
        {f"{SLOT}.kl-ratio-weighted.beta": 0.3, f"{SLOT}.kl-ratio-weighted.estimator": "k2"},
        lambda batch, weight: penalties.kl_ratio_weighted(batch, weight, 0.3, "k2"),
    ),
}
few = examples(10)
some = examples(20)


@pytest.mark.parametrize("host", ["grpo", "dapo", "srpo", "gspo", "luspo"])
@pytest.mark.parametrize("form", KL)
@few
@given(data=st.data())
def test_a_kl_term_takes_the_aggregation_of_its_host(form: str, host: str, data: st.DataObject) -> None:
    # w k + w dk cancels to nothing of its size where ref is far above new, and then says little.
    batch = keep_fields(data.draw(batches(wild="weighted" not in form)), "ref")
    overrides, penalty = KL[form]
    reference = HOSTS[host].under(batch) + penalty(batch, HOSTS[host].aggregate(batch))
    assert_agrees(evaluate(legato.algorithm(host, overrides), batch), reference)


@pytest.mark.parametrize("host", ["grpo", "dapo", "gspo"])
@few
@given(batch=batches())
def test_a_kl_term_does_not_follow_weights_and_rejections(host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "ref", "roll")
    overrides = {
        "objective.corrections.tis.level": "token",
        "objective.corrections.veto.floor": 0.5,
        f"{SLOT}.kl.beta": 0.3,
    }
    keep = corrections.keep_rows(batch, corrections.veto_survivors(batch, 0.5))
    policy = HOSTS[host].under(batch, corrections.truncated(batch, "token"), keep)
    reference = policy + penalties.kl(batch, HOSTS[host].aggregate(batch), 0.3)
    assert_agrees(evaluate(legato.algorithm(host, overrides), batch), reference)


@pytest.mark.parametrize("host", ["grpo", "dapo", "gspo"])
@some
@given(batch=batches())
def test_the_entropy_bonus_is_a_token_mean_on_every_host(host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "entropy")
    algorithm = legato.algorithm(host, {f"{SLOT}.entropy.coefficient": 0.05})
    loss, gradient = penalties.entropy_bonus(batch, 0.05)
    policy = HOSTS[host].under(batch)
    entropy = torch.tensor(batch.entropy, dtype=torch.float64, requires_grad=True)
    evaluation = evaluate(algorithm, batch, entropy=entropy)
    assert_agrees(evaluation, Result(policy.loss + loss, policy.gradient))
    assert_rows_close(entropy.grad.tolist(), gradient)
    assert_rows_close(evaluation.outcome.entropy_coefficients.tolist(), [[-e for e in row] for row in gradient])


@some
@given(batch=batches("token", wild=False, filled=True), fraction=st.sampled_from([0.1, 0.31, 0.7]))
def test_kl_cov_penalises_the_tokens_of_largest_covariance(batch: Batch, fraction: float) -> None:
    batch = keep_fields(batch)
    algorithm = legato.algorithm(
        "srpo", {"objective.trust": [], f"{SLOT}.kl-cov.fraction": fraction, f"{SLOT}.kl-cov.beta": 0.7}
    )
    weight, log_ratio = HOSTS["srpo"].aggregate(batch), HOSTS["srpo"].log_ratio(batch)
    selected = selections.top_covariance_tokens(batch, int(fraction * batch.token_count()))
    policy = objectives.unclipped_tokens(batch, weight, log_ratio)
    assert_agrees(evaluate(algorithm, batch, "token"), policy + penalties.kl_cov(batch, weight, selected, 0.7))


@some
@given(batch=batches())
def test_several_penalties_add_up(batch: Batch) -> None:
    batch = keep_fields(batch, "ref", "values", "old_values", "returns")
    algorithm = legato.algorithm(
        "ppo",
        {f"{SLOT}.kl.beta": 0.1, f"{SLOT}.kl-straight-through.beta": 0.2, f"{SLOT}.value.coefficient": 0.25},
    )
    weight = HOSTS["srpo"].aggregate(batch)
    value, _ = penalties.value_loss(batch, 0.5, 0.25)
    reference = HOSTS["srpo"].under(batch) + penalties.kl(batch, weight, 0.1)
    reference = reference + penalties.kl_straight_through(batch, weight, 0.2)
    assert_agrees(evaluate(algorithm, batch), Result(reference.loss + value, reference.gradient))
