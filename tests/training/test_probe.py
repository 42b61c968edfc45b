"""The probe measures the noise of log s and says whether the engine's word may be the anchor."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import legato
from legato.core.batch import Batch
from legato.policy.policy import Policy
from legato.training.probe import Floor, band, probe
from legato.training.tables import Tables
from policy.exact import family, policy_of
from training.steps import batch_by_hand

CPU = torch.device("cpu")


def heard(policy: Policy, noise: Tensor | float, groups: int = 6, each: int = 4) -> Tables:
    """A batch whose engine reported the trainer's own log-probs and so much more."""
    batch = batch_by_hand(groups=groups, each=each)
    exact = policy.score(Tables.of(batch, CPU).texts, torch.arange(len(batch))).logprobs
    return Tables.of(replace(batch, sampler_logprobs=torch.where(batch.mask, exact + noise, torch.nan)), CPU)


@pytest.mark.parametrize(
    ("noise", "safe"),
    [(0.0, True), (1e-5, True), (-1e-5, True), (9e-5, True), (1.1e-4, False), (5e-4, False), (-5e-2, False)],
)
def test_the_engine_is_safe_for_gspo_below_a_third_of_the_published_band(noise: float, safe: bool) -> None:
    policy = policy_of(family("qwen3"))
    floor = probe(policy, legato.algorithm("gspo"), heard(policy, noise), 40)
    assert floor.band == 3e-4 and floor.sampler_is_safe is safe
    assert abs(floor.engine_max - abs(noise)) < 1e-9 and floor.engine_rms <= floor.engine_max + 1e-15
    assert floor.packs_max < 1e-12


@pytest.mark.parametrize(("name", "noise", "safe"), [("grpo", 5e-2, True), ("grpo", 7e-2, False), ("luspo", 5e-4, True)])
def test_the_same_noise_is_safe_under_a_wider_band(name: str, noise: float, safe: bool) -> None:
    policy = policy_of(family("qwen3"))
    assert probe(policy, legato.algorithm(name), heard(policy, noise), 40).sampler_is_safe is safe


def test_one_response_that_is_off_is_enough() -> None:
    policy = policy_of(family("qwen3"))
    noise = torch.zeros(24, 1, dtype=torch.float64)
    noise[17] = 0.01
    floor = probe(policy, legato.algorithm("gspo"), heard(policy, noise), 40)
    assert abs(floor.engine_max - 0.01) < 1e-9 and not floor.sampler_is_safe
    assert abs(floor.engine_rms - 0.01 / 24**0.5) < 1e-9


def test_noise_that_cancels_within_a_response_is_no_noise_of_log_s() -> None:
    policy, batch = policy_of(family("qwen3")), batch_by_hand(groups=6, each=4)
    signs = torch.where(batch.mask, (batch.mask.cumsum(1) % 2 * 2 - 1).double(), 0.0)
    signs = torch.where(batch.mask.sum(1, keepdim=True) % 2 == 0, signs, 0.0)
    floor = probe(policy, legato.algorithm("gspo"), heard(policy, 0.02 * signs), 40)
    assert floor.engine_max < 1e-9


def test_noise_that_cancels_within_a_response_is_noise_to_a_ratio_per_token() -> None:
    policy, batch = policy_of(family("qwen3")), batch_by_hand(groups=6, each=4)
    signs = torch.where(batch.mask, (batch.mask.cumsum(1) % 2 * 2 - 1).double(), 0.0)
    signs = torch.where(batch.mask.sum(1, keepdim=True) % 2 == 0, signs, 0.0)
    # Every ratio would start 0.18 off, of a band of 0.2.
    assert not probe(policy, legato.algorithm("grpo"), heard(policy, 0.18 * signs), 40).sampler_is_safe


def test_an_algorithm_without_a_band_never_trusts_the_engine() -> None:
    policy = policy_of(family("qwen3"))
    value = legato.algorithm("cispo")
    assert band(value) is None and not probe(policy, value, heard(policy, 0.0), 40).sampler_is_safe


def test_the_band_is_the_narrower_side_of_the_clip() -> None:
    assert band(legato.algorithm("gspo")) == 3e-4
    assert band(legato.algorithm("gspo", {"objective.trust.clip.high": 1e-4})) == 1e-4
    assert band(legato.algorithm("dapo")) == 0.2 and band(legato.algorithm("gmpo")) == 0.4
    assert band(legato.algorithm("gspo", {"objective.trust": []})) is None


def test_at_most_64_responses_are_scored_again() -> None:
    policy = policy_of(family("qwen3"))
    tables, seen = heard(policy, 0.0, groups=20, each=6), []

    def far(batch: Batch) -> Batch:
        noise = torch.zeros(len(batch), 1, dtype=torch.float64)
        noise[64:] = 1.0
        return replace(batch, sampler_logprobs=batch.sampler_logprobs + noise)

    original = Policy.score

    def counting(self: Policy, texts: object, rows: Tensor) -> object:
        seen.append(len(rows))
        return original(self, texts, rows)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "score", counting)
        floor = probe(policy, legato.algorithm("gspo"), Tables.of(far(tables.batch), CPU), 40)
    assert sum(seen) == 2 * 64 and floor.engine_max < 1e-9


def test_a_floor_says_what_was_measured_and_chosen() -> None:
    floor = Floor(
        packs_max=1e-7, packs_rms=1e-8, engine_max=5e-4, engine_rms=1e-4, engine_token_max=1e-3, token_ratio=False, band=3e-4
    )
    sentence = floor.sentence("recompute")
    assert "1.0e-07" in sentence and "5.0e-04" in sentence and "3.0e-04" in sentence and "recomputed" in sentence
    assert floor.metrics()["noise/engine_max"] == 5e-4
