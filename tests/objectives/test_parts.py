"""Corrections and selections on hosts equal the reference, on generated updates."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import legato
from tests.proof.batches import batches, examples, keep_fields
from tests.proof.bridge import assert_agrees, evaluate
from tests.proof.hosts import HOSTS
from tests.reference import aggregation, corrections, objectives, ratios, selections
from tests.reference.batch import Batch, Rows

ACTIONS: dict[str, Callable[[Batch, str], Rows]] = {
    "tis": corrections.truncated,
    "mis": corrections.masked_above,
    "icepop": corrections.masked_outside,
    "decoupled": corrections.uncapped,
}
SURVIVORS: dict[str, tuple[dict[str, float], Callable[[Batch], set[int]]]] = {
    "geo-rejection": ({"floor": 0.7, "cap": 1.3}, lambda batch: corrections.geometric_survivors(batch, 0.7, 1.3)),
    "k3-rejection": ({"threshold": 0.1}, lambda batch: corrections.k3_survivors(batch, 0.1)),
    "veto": ({"floor": 0.5}, lambda batch: corrections.veto_survivors(batch, 0.5)),
}
SLOT = "objective.corrections"
THREE_HOSTS = ["grpo", "dapo", "gspo"]
few = examples(8)
some = examples(20)


def fields(part: str, values: dict[str, Any]) -> dict[str, Any]:
    """Overrides that add a correction with the given fields."""
    return {f"{SLOT}.{part}.{field}": value for field, value in values.items()}


@pytest.mark.parametrize("host", THREE_HOSTS)
@pytest.mark.parametrize("level", ["token", "sequence", "product"])
@pytest.mark.parametrize("part", ACTIONS)
@few
@given(batch=batches())
def test_a_behaviour_weight_multiplies_the_policy_term(part: str, level: str, host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    evaluation = evaluate(legato.algorithm(host, fields(part, {"level": level})), batch)
    assert_agrees(evaluation, HOSTS[host].under(batch, ACTIONS[part](batch, level)))


@pytest.mark.parametrize("host", ["grpo", "gspo", "turn-gspo"])
@pytest.mark.parametrize("part", ACTIONS)
@few
@given(batch=batches())
def test_a_matching_behaviour_weight_takes_the_segments_of_the_ratio(part: str, host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll", *(("turn",) if host == "turn-gspo" else ()))
    evaluation = evaluate(legato.algorithm(host, fields(part, {"level": "match"})), batch)
    assert_agrees(evaluation, HOSTS[host].under(batch, ACTIONS[part](batch, HOSTS[host].level)))


@some
@given(batch=batches())
def test_truncated_sampling_is_renormalised_in_the_behaviour_ratio_only(batch: Batch) -> None:
    batch = keep_fields(batch, "roll", "kept_logmass")
    evaluation = evaluate(legato.algorithm("grpo", fields("tis", {"level": "token"})), batch)
    assert_agrees(evaluation, HOSTS["grpo"].under(batch, corrections.truncated(batch, "token")))
    bypass = evaluate(legato.algorithm("grpo", {"objective.ratio.anchor": "sampler"}), batch)
    assert_agrees(bypass, HOSTS["grpo"].under(batch, anchor="sampler"))


@pytest.mark.parametrize("host", THREE_HOSTS)
@pytest.mark.parametrize("part", SURVIVORS)
@few
@given(batch=batches())
def test_a_rejected_row_loses_its_policy_term_and_keeps_its_place(part: str, host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    values, survivors = SURVIVORS[part]
    keep = corrections.keep_rows(batch, survivors(batch))
    assert_agrees(evaluate(legato.algorithm(host, fields(part, values)), batch), HOSTS[host].under(batch, keep))


@pytest.mark.parametrize("host", ["grpo", "dapo", "srpo", "gspo", "luspo"])
@pytest.mark.parametrize("part", SURVIVORS)
@few
@given(batch=batches())
def test_kept_denominators_count_the_survivors_only(part: str, host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    values, rule = SURVIVORS[part]
    survivors = rule(batch)
    algorithm = legato.algorithm(host, {**fields(part, values), "aggregate.denominator": "kept"})
    reference = HOSTS[host].under(batch, corrections.keep_rows(batch, survivors), kept=survivors)
    assert_agrees(evaluate(algorithm, batch), reference)


@pytest.mark.parametrize("host", [*THREE_HOSTS, "gmpo"])
@some
@given(batch=batches())
def test_the_sampler_as_anchor_needs_no_further_weight(host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    evaluation = evaluate(legato.algorithm(host, {"objective.ratio.anchor": "sampler"}), batch)
    assert_agrees(evaluation, HOSTS[host].under(batch, anchor="sampler"))


@pytest.mark.parametrize("host", ["grpo", "gspo", "gmpo"])
@some
@given(batch=batches())
def test_router_shift_before_the_clip_moves_the_ratio(host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "gamma")
    algorithm = legato.algorithm(host, fields("router-shift", {"placement": "before-clip"}))
    log_ratio = ratios.with_router_shift(batch, HOSTS[host].log_ratio(batch))
    assert_agrees(evaluate(algorithm, batch), HOSTS[host].clip(batch, HOSTS[host].aggregate(batch), log_ratio))


@pytest.mark.parametrize("host", ["grpo", "gspo", "gmpo"])
@some
@given(batch=batches())
def test_router_shift_after_the_clip_scales_the_term(host: str, batch: Batch) -> None:
    batch = keep_fields(batch, "gamma")
    algorithm = legato.algorithm(host, fields("router-shift", {"placement": "after-clip"}))
    shift = ratios.router_shift_weights(batch, HOSTS[host].level)
    assert_agrees(evaluate(algorithm, batch), HOSTS[host].under(batch, shift))


@pytest.mark.parametrize(("host", "high"), [("grpo", 0.2), ("dapo", 0.28)])
@some
@given(batch=batches("token"))
def test_dual_clip_bounds_negative_tokens(host: str, high: float, batch: Batch) -> None:
    batch = keep_fields(batch)
    evaluation = evaluate(legato.algorithm(host, {"objective.trust.dual-clip.cap": 1.5}), batch, "token")
    weight, log_ratio = HOSTS[host].aggregate(batch), HOSTS[host].log_ratio(batch)
    assert_agrees(evaluation, objectives.clipped_tokens(batch, weight, log_ratio, 0.2, high, dual_cap=1.5))


@some
@given(batch=batches())
def test_dual_clip_on_gspo_bounds_negative_sequences(batch: Batch) -> None:
    batch = keep_fields(batch)
    evaluation = evaluate(legato.algorithm("gspo", {"objective.trust.dual-clip.cap": 1.5}), batch)
    weight, log_ratio = HOSTS["gspo"].aggregate(batch), HOSTS["gspo"].log_ratio(batch)
    assert_agrees(evaluation, objectives.clipped_segments(batch, weight, log_ratio, 3e-4, 4e-4, dual_cap=1.5))


@some
@given(batch=batches("turn"))
def test_the_band_of_a_turn_may_grow_as_turns_get_shorter(batch: Batch) -> None:
    batch = keep_fields(batch, "turn")
    algorithm = legato.algorithm(
        "turn-gspo", {"objective.trust.clip.scale": "sqrt-length", "objective.trust.clip.reference_length": 2048}
    )
    weight, log_ratio = HOSTS["turn-gspo"].aggregate(batch), HOSTS["turn-gspo"].log_ratio(batch)
    reference = objectives.clipped_segments(batch, weight, log_ratio, 3e-4, 4e-4, "turn", reference_length=2048)
    assert_agrees(evaluate(algorithm, batch, "turn"), reference)


@pytest.mark.parametrize("host", THREE_HOSTS)
@pytest.mark.parametrize("anchor", ["sampler", "old"])
@some
@given(batch=batches())
def test_opsm_drops_negative_rows_that_drifted(host: str, anchor: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    overrides = {"objective.trust.opsm.threshold": 0.1, "objective.trust.opsm.anchor": anchor}
    keep = corrections.keep_rows(batch, selections.off_policy_survivors(batch, 0.1, anchor))
    assert_agrees(evaluate(legato.algorithm(host, overrides), batch), HOSTS[host].under(batch, keep))


@pytest.mark.parametrize("host", THREE_HOSTS)
@pytest.mark.parametrize("anchor", ["sampler", "old"])
@some
@given(batch=batches())
def test_trm_drops_rows_outside_the_trust_region(host: str, anchor: str, batch: Batch) -> None:
    batch = keep_fields(batch, "roll")
    values = {"max_threshold": 0.3, "mean_threshold": 0.08, "anchor": anchor}
    overrides = {f"objective.trust.trm.{field}": value for field, value in values.items()}
    keep = corrections.keep_rows(batch, selections.trust_region_survivors(batch, 0.3, 0.08, anchor))
    assert_agrees(evaluate(legato.algorithm(host, overrides), batch), HOSTS[host].under(batch, keep))


COVARIANCE = {"objective.trust.clip-cov.low": 0.1, "objective.trust.clip-cov.high": 2.0}


@some
@given(batch=batches("token", wild=False, filled=True))
def test_clip_cov_can_leave_out_every_token_of_the_band(batch: Batch) -> None:
    batch = keep_fields(batch)
    algorithm = legato.algorithm("srpo", {**COVARIANCE, "objective.trust.clip-cov.selection": "all"})
    dropped = selections.covariance_candidates(batch, 0.2, 0.2, 0.1, 2.0)
    reference = HOSTS["srpo"].under(batch, selections.drop_tokens(batch, dropped))
    assert_agrees(evaluate(algorithm, batch, "token"), reference)


@some
@given(batch=batches("token", wild=False, filled=True), fraction=st.sampled_from([2e-4, 0.1, 0.25]))
def test_clip_cov_leaves_out_a_random_few_of_the_band(batch: Batch, fraction: float) -> None:
    batch = keep_fields(batch, "uniform")
    algorithm = legato.algorithm("srpo", {**COVARIANCE, "objective.trust.clip-cov.fraction": fraction})
    evaluation = evaluate(algorithm, batch, "token")
    candidates = selections.covariance_candidates(batch, 0.2, 0.2, 0.1, 2.0)
    by_number = sorted(candidates, key=lambda token: batch.uniform[token[0]][token[1]])
    count = min(len(candidates), selections.clip_cov_count(batch, fraction))
    dropped = [(row, t) for row, t in candidates if batch.advantages[row][t] and not evaluation.gradient[row][t]]
    if all(batch.advantages[row][t] for row, t in candidates):
        # Which end of the uniform numbers is taken is not specified; that they decide is.
        assert sorted(dropped) in (sorted(by_number[:count]), sorted(by_number[len(by_number) - count :]))
    assert_agrees(evaluation, HOSTS["srpo"].under(batch, selections.drop_tokens(batch, dropped)))


@some
@given(batch=batches(filled=True), data=st.data())
def test_the_entropy_filter_keeps_the_most_uncertain_tokens(batch: Batch, data: st.DataObject) -> None:
    batch = keep_fields(batch, "entropy")
    tokens = batch.token_count()
    count = data.draw(st.integers(1, tokens))
    assume((count / tokens) * tokens == count)
    algorithm = legato.algorithm("dapo", {"objective.trust.high-entropy.fraction": count / tokens})
    keep = selections.keep_tokens(batch, selections.top_entropy_tokens(batch, count))
    assert_agrees(evaluate(algorithm, batch), HOSTS["dapo"].under(batch, keep))


@some
@given(batch=batches(), data=st.data())
def test_rows_that_the_caller_drops_lose_their_policy_term(batch: Batch, data: st.DataObject) -> None:
    batch = keep_fields(batch)
    rows = {row for row in batch.filled_rows() if data.draw(st.booleans())}
    keep = torch.tensor([[row in rows] * len(mask) for row, mask in enumerate(batch.mask)])
    for host in ("grpo", "dapo", "gspo"):
        reference = HOSTS[host].under(batch, corrections.keep_rows(batch, rows))
        assert_agrees(evaluate(host, batch, keep=keep), reference)


@some
@given(batch=batches(filled=True))
def test_rho_is_limited_before_it_weighs(batch: Batch) -> None:
    roll = [[old + 30.0 if math.isfinite(old) else old for old in row] for row in batch.old]
    batch = keep_fields(Batch(**{**vars(batch), "roll": roll}), "roll")
    evaluation = evaluate(legato.algorithm("srpo", fields("decoupled", {"level": "token"})), batch)
    weight = aggregation.times(batch, corrections.uncapped(batch, "token"))
    assert_agrees(evaluation, HOSTS["srpo"].under(batch, weight), absolute=1e-20)
