"""Legato against verl's loss and advantage functions (`verl/trainer/ppo/core_algos.py`), on the same float64 tensors:
equal for equal settings; other differences are exactly those that the tests name.

verl adds 1e-8 to the length of each response, so "equal" is to 1e-7 wherever a response is averaged. Run in an
environment with tests/peers/requirements.txt installed and verl beside it (without its dependencies).
"""

import math
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import legato
from tests.peers.sides import Batch, Side, agree, fixed_batch, ours, scaled, with_empty_row
from tests.peers.verl_functions import installed_folder, load, verl_advantages, verl_side

try:
    CORE: ModuleType = load()
except ImportError as missing:
    pytest.skip(f"verl is not installed (tests/peers/requirements.txt): {missing}", allow_module_level=True)

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
"""The paper's clip in verl's words; its aggregation is the argument beside it."""
SEQUENCE_MEAN, TOKEN_MEAN = "seq-mean-token-mean", "token-mean"
NO_DUAL_CLIP = {"clip_ratio_c": 1e9}

DRIFTED = 7
"""A row with a negative advantage and 8 tokens."""

EXACT = 1e-12
LENGTHS_PLUS_1E8 = 1e-7


def verl(batch: Batch, loss: str, aggregation: str, **config: object) -> Side:
    return verl_side(CORE, batch, loss, aggregation, **config)


def without_advantages(batch: Batch) -> Batch:
    """The batch with zero advantages: only the penalties contribute to the loss."""
    return replace(batch, advantages=torch.zeros_like(batch.advantages))


# ---- the same settings give the same loss and gradient


def test_gspo_equals_verls_under_a_sequence_mean() -> None:
    """verl's is the token form, with the ratio carried by each token: one and the same for equal advantages."""
    right = verl(fixed_batch(), "gspo", SEQUENCE_MEAN, **GSPO)
    assert agree(ours(fixed_batch(), "gspo"), right, tolerance=LENGTHS_PLUS_1E8)
    assert agree(ours(fixed_batch(), "gspo-token"), right, tolerance=LENGTHS_PLUS_1E8)


def test_grpo_equals_verls_without_its_dual_clip() -> None:
    right = verl(fixed_batch(), "vanilla", SEQUENCE_MEAN, **NO_DUAL_CLIP)
    assert agree(ours(fixed_batch(), "grpo"), right, tolerance=LENGTHS_PLUS_1E8)


def test_gmpo_equals_verls() -> None:
    right = verl(fixed_batch(), "geo_mean", "not read", clip_ratio=0.4)
    assert agree(ours(fixed_batch(), "gmpo"), right, tolerance=LENGTHS_PLUS_1E8)


def test_sapo_equals_verls() -> None:
    assert agree(ours(fixed_batch(), "sapo"), verl(fixed_batch(), "sapo", "not read"), tolerance=LENGTHS_PLUS_1E8)


def test_cispo_with_the_same_bounds_equals_verls() -> None:
    overrides = {
        "objective.trust.weight-clip.floor": 0.8,
        "objective.trust.weight-clip.cap": 1.2,
        "aggregate": "token-mean",
    }
    assert agree(ours(fixed_batch(), "cispo", overrides), verl(fixed_batch(), "cispo", TOKEN_MEAN), tolerance=EXACT)


@pytest.mark.parametrize(
    ("name", "divergence", "threshold"), [("dppo_tv", "total-variation", 0.05), ("dppo_kl", "kl", 0.005)]
)
def test_dppo_equals_verls(name: str, divergence: str, threshold: float) -> None:
    batch = fixed_batch()
    overrides = {
        "objective.trust.divergence-mask.divergence": divergence,
        "objective.trust.divergence-mask.threshold": threshold,
    }
    left = ours(batch, "dppo", overrides, sampler_logprobs=batch.old_logprobs)
    right = verl(batch, name, TOKEN_MEAN, clip_ratio=threshold, clip_ratio_c=20.0)
    assert agree(left, right, tolerance=EXACT)
    assert (right.gradient[batch.mask] == 0).any(), "the mask must drop something for this to say anything"


def test_kl_cov_equals_verls() -> None:
    overrides = {
        "objective.trust": [],
        "objective.penalties.kl-cov.fraction": 0.1,
        "objective.penalties.kl-cov.beta": 1.0,
        "aggregate": "token-mean",
    }
    config = SimpleNamespace(kl_cov_ratio=0.1, ppo_kl_coef=1.0)
    right = verl(fixed_batch(), "kl_cov", TOKEN_MEAN, policy_loss=config)
    assert agree(ours(fixed_batch(), "grpo", overrides), right, tolerance=EXACT)


def test_clip_cov_equals_verls_where_all_candidates_are_taken() -> None:
    """verl draws the tokens it drops with an unseeded permutation; with a fraction of 1 there is nothing to draw."""
    overrides = {
        "objective.trust.clip.low": 1.0,
        "objective.trust.clip.high": 1.0,
        "objective.trust.clip-cov.fraction": 1.0,
        "objective.trust.clip-cov.low": 0.1,
        "objective.trust.clip-cov.high": 2.0,
        "objective.trust.clip-cov.selection": "all",
        "aggregate": "token-mean",
    }
    config = SimpleNamespace(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=2.0)
    left = ours(fixed_batch(), "grpo", overrides)
    right = verl(fixed_batch(), "clip_cov", TOKEN_MEAN, clip_ratio=1.0, policy_loss=config)
    assert agree(left, right, tolerance=EXACT)
    assert not agree(left, verl(fixed_batch(), "vanilla", TOKEN_MEAN, clip_ratio=1.0), tolerance=1e-3)


@pytest.mark.parametrize(
    ("aggregation", "overrides"),
    [
        ("token-mean", {"aggregate": "token-mean"}),
        ("seq-mean-token-mean", {"aggregate": "sequence-mean"}),
        ("seq-mean-token-sum", {"aggregate": "sequence-sum"}),
        ("seq-mean-token-sum-norm", {"aggregate": "sequence-sum-over-constant", "aggregate.constant": 20.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("batch", [fixed_batch(), with_empty_row(fixed_batch())], ids=["all rows", "an empty row"])
def test_each_aggregation_equals_verls(batch: Batch, aggregation: str, overrides: dict[str, object]) -> None:
    right = verl(batch, "gpg", aggregation, global_batch_info={"loss_scale_factor": 20})
    assert agree(ours(batch, "reinforce", overrides), right, tolerance=LENGTHS_PLUS_1E8)


@pytest.mark.parametrize(
    ("name", "penalty"),
    [
        ("k1", {"objective.penalties.kl.beta": 0.04, "objective.penalties.kl.estimator": "k1"}),
        ("k2", {"objective.penalties.kl.beta": 0.04, "objective.penalties.kl.estimator": "k2"}),
        ("k3", {"objective.penalties.kl.beta": 0.04, "objective.penalties.kl.estimator": "k3"}),
        ("k3+", {"objective.penalties.kl-straight-through.beta": 0.04}),
    ],
    ids=["k1", "k2", "k3", "k3+"],
)
def test_each_kl_estimator_equals_verls(name: str, penalty: dict[str, object]) -> None:
    batch = without_advantages(fixed_batch())
    left = ours(batch, "grpo", penalty, ref_logprobs=batch.ref_logprobs)
    logprobs = batch.logprobs.clone().requires_grad_()
    penalties = CORE.kl_penalty(logprobs, batch.ref_logprobs, name)
    value = 0.04 * CORE.agg_loss(penalties, batch.mask.double(), SEQUENCE_MEAN)
    value.backward()
    assert agree(left, Side(loss=value.item(), gradient=logprobs.grad), tolerance=LENGTHS_PLUS_1E8)


def test_the_clipped_value_loss_equals_verls() -> None:
    batch = without_advantages(fixed_batch())
    generator = torch.Generator().manual_seed(13)
    old_values, returns, moves = torch.randn(3, *batch.mask.shape, generator=generator, dtype=torch.float64)
    our_values = (old_values + moves).requires_grad_()
    outcome = legato.loss(
        "ppo",
        logprobs=batch.logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        group=batch.group,
        values=our_values,
        old_values=old_values,
        returns=returns,
    )
    outcome.loss.backward()
    verl_values = (old_values + moves).requires_grad_()
    # The coefficient is the trainer's in verl and the part's with us.
    value = 0.5 * CORE.compute_value_loss(verl_values, returns, old_values, batch.mask.double(), cliprange_value=0.5)[0]
    value.backward()
    left, right = (
        Side(loss=outcome.loss.item(), gradient=our_values.grad),
        Side(loss=value.item(), gradient=verl_values.grad),
    )
    assert agree(left, right, tolerance=EXACT)


REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.2, 0.9, 0.4, 0.7], dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "overrides"),
    [
        ("grpo", {"advantage": "group-z", "advantage.ddof": 1}),
        ("rloo", {"advantage": "leave-one-out"}),
        ("opo", {"advantage": "length-weighted"}),
        ("reinforce_plus_plus", {"advantage": "batch-z", "advantage.unit": "token", "advantage.ddof": 1}),
        (
            "reinforce_plus_plus_baseline",
            {"advantage": "group-centre-batch-z", "advantage.unit": "token", "advantage.ddof": 1},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_advantage_equals_verls(estimator: str, overrides: dict[str, object]) -> None:
    batch = fixed_batch()
    algorithm = legato.algorithm("grpo", overrides)
    advantages = legato.advantages(algorithm, rewards=REWARDS, group=batch.group, mask=batch.mask).advantages
    from_verl, _ = verl_advantages(CORE, estimator, REWARDS, batch.mask, batch.group, config=SimpleNamespace(gamma=1.0))
    spread = advantages[:, None].expand_as(from_verl) if advantages.dim() == 1 else advantages
    torch.testing.assert_close(spread[batch.mask], from_verl[batch.mask], rtol=1e-7, atol=1e-7)


def test_advantages_without_the_deviation_equal_verls() -> None:
    batch = fixed_batch()
    advantages = legato.advantages("dr-grpo", rewards=REWARDS, group=batch.group).advantages
    from_verl, _ = verl_advantages(CORE, "grpo", REWARDS, batch.mask, batch.group, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(
        advantages[:, None].expand_as(from_verl)[batch.mask], from_verl[batch.mask], rtol=1e-12, atol=1e-12
    )


def test_gae_skips_tool_tokens_as_verl_does() -> None:
    """The returns are equal; the advantages too, but for verl's sample deviation (ddof 1) in the whitening."""
    batch = fixed_batch()
    values = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(17), dtype=torch.float64)
    scored = legato.advantages("ppo", rewards=REWARDS, group=batch.group, mask=batch.mask, values=values)
    from_verl, returns = verl_advantages(CORE, "gae", REWARDS, batch.mask, batch.group, values=values, gamma=1.0, lam=0.95)
    torch.testing.assert_close(scored.returns[batch.mask], returns[batch.mask], rtol=1e-12, atol=1e-12)
    n = batch.mask.sum().item()
    shrunk = scored.advantages[batch.mask] * math.sqrt((n - 1) / n)
    torch.testing.assert_close(shrunk, from_verl[batch.mask], rtol=1e-7, atol=1e-7)


# ---- different on purpose


def test_verls_clipped_share_of_gspo_counts_tokens() -> None:
    """A response is clipped as a whole, so we report the share of responses; the share of tokens stands beside it."""
    left, right = ours(fixed_batch(), "gspo").metrics, verl(fixed_batch(), "gspo", SEQUENCE_MEAN, **GSPO).metrics
    assert left["clip/tokens"] == pytest.approx(right["actor/pg_clipfrac"], rel=1e-6)
    assert left["clip/sequences"] == 3 / 8
    assert right["actor/pg_clipfrac_lower"] == 0.0


def test_verls_default_aggregation_for_gspo_is_a_token_mean() -> None:
    """Its actor config says token-mean, which weighs each response by its length; the paper's is a sequence mean."""
    yaml = pytest.importorskip("yaml", reason="verl's defaults are in a YAML file")
    defaults = yaml.safe_load((installed_folder() / "trainer/config/actor/actor.yaml").read_text())
    assert defaults["loss_agg_mode"] == TOKEN_MEAN
    assert (defaults["clip_ratio_low"], defaults["clip_ratio_high"]) == (0.2, 0.2)
    right = verl(fixed_batch(), "gspo", defaults["loss_agg_mode"], **GSPO)
    assert not agree(ours(fixed_batch(), "gspo"), right, tolerance=1e-3)
    assert agree(ours(fixed_batch(), "gspo", {"aggregate": "token-mean"}), right, tolerance=EXACT)


def test_verls_vanilla_loss_always_has_a_dual_clip() -> None:
    """A dual clip of 3 is its default and cannot be turned off, only moved away; with us it is a part to add."""
    right = verl(fixed_batch(), "vanilla", SEQUENCE_MEAN)
    assert not agree(ours(fixed_batch(), "grpo"), right, tolerance=1e-3)
    left = ours(fixed_batch(), "grpo", {"objective.trust.dual-clip.cap": 3.0})
    assert agree(left, right, tolerance=LENGTHS_PLUS_1E8)


def test_verl_clamps_a_sequence_ratio_at_e_to_the_ten() -> None:
    """Beyond log s = 10 its value is constant and its gradient is 0. Ours does not limit log s: the gradient of such a
    response matters if its advantage is negative, and the metrics show the ratio."""
    batch = fixed_batch()
    batch.logprobs[DRIFTED] = batch.old_logprobs[DRIFTED] + 12.0
    left, right = ours(batch, "gspo"), verl(batch, "gspo", SEQUENCE_MEAN, **GSPO)
    assert (right.gradient[DRIFTED] == 0).all()
    assert math.isclose(left.gradient[DRIFTED, 0].item(), 1.2 * math.exp(12.0) / (8 * 8), rel_tol=1e-9)
    others = torch.arange(8) != DRIFTED
    torch.testing.assert_close(left.gradient[others], right.gradient[others], rtol=1e-7, atol=1e-12)


def test_a_masked_nan_reaches_verls_gspo_and_not_ours() -> None:
    """verl multiplies by the mask before it sums over the response, and NaN times 0 is NaN; ours selects."""
    batch = fixed_batch()
    batch.old_logprobs[~batch.mask] = math.nan
    assert math.isnan(verl(batch, "gspo", SEQUENCE_MEAN, **GSPO).loss)
    assert agree(ours(batch, "gspo"), ours(fixed_batch(), "gspo"), tolerance=0.0)


def test_verls_gmpo_counts_a_response_without_tokens_in_its_mean() -> None:
    """Its other losses leave such a response out, as ours do; this one takes the mean of all rows."""
    batch = with_empty_row(fixed_batch())
    left, right = ours(batch, "gmpo"), verl(batch, "geo_mean", "not read", clip_ratio=0.4)
    assert not agree(left, right, tolerance=1e-3)
    assert agree(scaled(left, 8 / 9), right, tolerance=LENGTHS_PLUS_1E8)


def test_verls_trainer_counts_a_response_without_tokens_in_its_nominal_size() -> None:
    """With the global size its trainer passes, the sequence mean divides by all rows, the empty one too."""
    batch = with_empty_row(fixed_batch())
    right = verl(batch, "gspo", SEQUENCE_MEAN, **GSPO, global_batch_info={"global_batch_size": 9})
    assert agree(scaled(ours(batch, "gspo"), 8 / 9), right, tolerance=LENGTHS_PLUS_1E8)


def test_verls_cispo_has_a_lower_bound_and_ours_a_cap_of_five() -> None:
    """The paper sets no lower bound and tunes the upper one; verl clips to 1 - low, 1 + high, by default .8 and 1.2."""
    right = verl(fixed_batch(), "cispo", TOKEN_MEAN)
    left = ours(fixed_batch(), "cispo", {"aggregate": "token-mean"})
    assert not agree(left, right, tolerance=1e-3)
    assert agree(left, verl(fixed_batch(), "cispo", TOKEN_MEAN, clip_ratio_low=1.0, clip_ratio_high=4.0), tolerance=EXACT)


def test_verl_clamps_k3_at_ten() -> None:
    """A reference far above the policy then has no gradient; ours limits the log-ratio to 20, not k3."""
    batch = without_advantages(fixed_batch())
    batch = replace(batch, ref_logprobs=batch.logprobs + 5.0)
    left = ours(batch, "grpo", {"objective.penalties.kl.beta": 1.0}, ref_logprobs=batch.ref_logprobs)
    assert math.isclose(left.loss, math.exp(5.0) - 5.0 - 1.0, rel_tol=1e-12)
    penalties = CORE.kl_penalty(batch.logprobs, batch.ref_logprobs, "k3")
    assert (penalties == 10.0).all()


def test_advantages_differ_from_verls_by_the_deviation_it_takes() -> None:
    """The sample deviation (ddof 1) in place of the group's own (ddof 0): a factor sqrt(3/4) in groups of four."""
    batch = fixed_batch()
    advantages = legato.advantages("grpo", rewards=REWARDS, group=batch.group).advantages
    from_verl, _ = verl_advantages(CORE, "grpo", REWARDS, batch.mask, batch.group)
    torch.testing.assert_close(advantages * math.sqrt(3 / 4), from_verl[:, 0], rtol=1e-5, atol=1e-7)


def test_a_group_of_one_keeps_its_raw_reward_in_verl_and_has_no_advantage_with_us() -> None:
    """There is nothing to compare a single response with, so it teaches nothing."""
    rewards, mask, group = torch.tensor([0.7], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool), torch.zeros(1)
    from_verl, _ = verl_advantages(CORE, "grpo", rewards, mask, group.long())
    torch.testing.assert_close(from_verl[0, 0].item(), 0.7, rtol=1e-5, atol=0)
    assert legato.advantages("grpo", rewards=rewards, group=group.long()).advantages.item() == 0.0
