"""Legato against TRL's `GRPOTrainer` on the same tensors: equal for equal settings; other differences are exactly those
that the tests name.

Float64 leaves [B, T] unless a test says that it goes through the model. Run in an environment with
tests/peers/requirements.txt installed.
"""

import math

import pytest
import torch

pytest.importorskip("trl", reason="the peers are not installed (tests/peers/requirements.txt)")

import legato
from tests.peers.sides import Side, agree, difference, fixed_batch, ours, rows, scaled, with_empty_row
from tests.peers.trl_trainer import import_trl, model_sides, trl_advantages, trl_side

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
"""The paper's settings in TRL's words."""
GRPO = {"loss_type": "grpo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": 0.2}
REWARDS = [1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
GROUP = torch.arange(8) // 4

EXACT = 1e-12
FLOAT32 = 1e-5
"""Two float32 passes through a model, by different heads; relative to the greatest entry."""


def cosine(left: Side, right: Side) -> float:
    return torch.nn.functional.cosine_similarity(left.gradient.double(), right.gradient.double(), dim=0).item()


def test_the_batch_holds_every_case_of_the_clip() -> None:
    """Inside, clipped high, clipped low, out of band but not clipped: otherwise the comparisons below would prove little."""
    batch = fixed_batch()
    log_ratio = torch.where(batch.mask, batch.logprobs - batch.old_logprobs, 0.0)
    sequence = (log_ratio.sum(1) / batch.mask.sum(1)).exp()
    positive = batch.advantages > 0
    for ratio, up, low, high in (
        (sequence, positive, 3e-4, 4e-4),
        (log_ratio.exp()[batch.mask], positive[:, None].expand_as(batch.mask)[batch.mask], 0.2, 0.2),
    ):
        above, below = ratio > 1 + high, ratio < 1 - low
        cases = {"inside": ~above & ~below, "high": above & up, "low": below & ~up, "not clipped": above & ~up | below & up}
        assert all(case.any() for case in cases.values()), cases


# ---- the same settings give the same loss and gradient


def test_gspo_equals_trl_at_sequence_level_with_the_papers_clip() -> None:
    assert agree(ours(fixed_batch(), "gspo"), trl_side(fixed_batch(), **GSPO), tolerance=EXACT)


def test_grpo_equals_trl_at_token_level() -> None:
    assert agree(ours(fixed_batch(), "grpo"), trl_side(fixed_batch(), **GRPO), tolerance=EXACT)


@pytest.mark.parametrize(("algorithm", "settings"), [("gspo", GSPO), ("grpo", GRPO)], ids=["gspo", "grpo"])
def test_every_parameter_of_a_model_gets_the_gradient_trl_gives_it(algorithm: str, settings: dict) -> None:
    left, right = model_sides(algorithm, **settings)
    assert agree(left, right, tolerance=FLOAT32)
    assert cosine(left, right) > 1 - 1e-9


def test_a_wider_upper_clip_equals_trls_epsilon_high() -> None:
    left = ours(fixed_batch(), "grpo", {"objective.trust.clip.high": 0.28})
    assert agree(left, trl_side(fixed_batch(), **(GRPO | {"epsilon_high": 0.28})), tolerance=EXACT)


def test_dual_clip_equals_trls_delta() -> None:
    left = ours(fixed_batch(), "grpo", {"objective.trust.dual-clip.cap": 3.0})
    assert agree(left, trl_side(fixed_batch(), **GRPO, delta=3.0), tolerance=EXACT)
    assert not agree(left, ours(fixed_batch(), "grpo"), tolerance=1e-3)


def test_the_kl_penalty_equals_trls_without_its_correction() -> None:
    batch = fixed_batch()
    left = ours(batch, "grpo", {"objective.penalties.kl.beta": 0.04}, ref_logprobs=batch.ref_logprobs)
    assert agree(left, trl_side(batch, **GRPO, beta=0.04, use_bias_correction_kl=False), tolerance=EXACT)


def test_the_ratio_weighted_kl_equals_trls_at_token_level() -> None:
    batch = fixed_batch()
    left = ours(batch, "grpo", {"objective.penalties.kl-ratio-weighted.beta": 0.04}, ref_logprobs=batch.ref_logprobs)
    assert agree(left, trl_side(batch, **GRPO, beta=0.04, use_bias_correction_kl=True), tolerance=EXACT)


def test_dr_grpo_equals_trls() -> None:
    left = ours(fixed_batch(), "dr-grpo", {"aggregate.constant": 16.0})
    right = trl_side(fixed_batch(), **(GRPO | {"loss_type": "dr_grpo", "max_completion_length": 16}))
    assert agree(left, right, tolerance=EXACT)


def test_luspo_equals_trls() -> None:
    settings = {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3}
    assert agree(ours(fixed_batch(), "luspo"), trl_side(fixed_batch(), **settings), tolerance=EXACT)


def test_vespo_equals_trls() -> None:
    assert agree(ours(fixed_batch(), "vespo"), trl_side(fixed_batch(), loss_type="vespo"), tolerance=EXACT)


def test_sapo_equals_trls_to_its_float32_temperatures() -> None:
    # TRL holds 1.0 and 1.05 in float32 whatever the log-probs are: 1.05 is 1.04999995 there.
    assert agree(ours(fixed_batch(), "sapo"), trl_side(fixed_batch(), loss_type="sapo"), tolerance=1e-7)


def test_dropping_off_policy_responses_equals_trls() -> None:
    overrides = {"objective.trust.opsm.threshold": 0.01, "objective.trust.opsm.anchor": "old"}
    left = ours(fixed_batch(), "grpo", overrides)
    assert agree(left, trl_side(fixed_batch(), **GRPO, off_policy_mask_threshold=0.01), tolerance=EXACT)
    assert not agree(left, ours(fixed_batch(), "grpo"), tolerance=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "settings", "unit"), [("gspo", GSPO, "sequences"), ("grpo", GRPO, "tokens")], ids=["gspo", "grpo"]
)
def test_the_clipped_share_equals_trls(algorithm: str, settings: dict, unit: str) -> None:
    left, right = ours(fixed_batch(), algorithm).metrics, trl_side(fixed_batch(), **settings).metrics
    assert left[f"clip/{unit}"] == pytest.approx(right["clip_ratio/region_mean"], rel=1e-6)
    assert right["clip_ratio/low_mean"] > 0
    assert right["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_advantages_equal_trls_when_its_deviation_is_asked_for(scale: str) -> None:
    # TRL divides by the sample deviation (ddof 1) plus 1e-4, in float32.
    overrides = {
        "group": {"advantage.ddof": 1, "advantage.epsilon": 1e-4},
        "none": {"advantage": "group-centre"},
        "batch": {"advantage": "group-centre-batch-std", "advantage.ddof": 1, "advantage.epsilon": 1e-4},
    }[scale]
    outcome = legato.advantages(legato.algorithm("grpo", overrides), rewards=torch.tensor(REWARDS), group=GROUP)
    theirs = trl_advantages(REWARDS, scale_rewards=scale)
    torch.testing.assert_close(outcome.advantages, theirs, rtol=1e-5, atol=1e-6)


# ---- different on purpose


def test_trls_default_loss_for_gspo_weighs_each_response_by_its_length() -> None:
    """`loss_type` is "dapo" unless set: the paper's sequence mean then becomes a token mean."""
    default = trl_side(fixed_batch(), **(GSPO | {"loss_type": "dapo"}))
    assert not agree(ours(fixed_batch(), "gspo"), default, tolerance=1e-3)
    assert agree(ours(fixed_batch(), "gspo", {"aggregate": "token-mean"}), default, tolerance=EXACT)


def test_trls_defaults_are_not_gspo() -> None:
    config = import_trl().GRPOConfig
    defaults = {name: field.default for name, field in config.__dataclass_fields__.items()}
    assert defaults["loss_type"] == "dapo"
    assert (defaults["epsilon"], defaults["epsilon_high"]) == (0.2, None)
    assert defaults["importance_sampling_level"] == "token"


def test_trl_counts_a_response_without_tokens_in_its_mean() -> None:
    """Ours leaves it out of N; TRL divides by all rows, so loss and gradient shrink by N / (N + 1)."""
    batch = with_empty_row(fixed_batch())
    for algorithm, settings in (("gspo", GSPO), ("grpo", GRPO)):
        left, right = ours(batch, algorithm), trl_side(batch, **settings)
        assert not agree(left, right, tolerance=1e-3)
        assert agree(scaled(left, 8 / 9), right, tolerance=EXACT)


def test_trls_dapo_is_one_mean_over_all_tokens_and_ours_a_mean_of_groups() -> None:
    """DAPO's formula divides by the tokens of each group. The two groups here have 30 and 22 tokens."""
    settings = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
    batch = fixed_batch()
    right = trl_side(batch, **settings)
    assert not agree(ours(batch, "dapo"), right, tolerance=1e-3)
    assert agree(ours(batch, "dapo", {"aggregate": "token-mean"}), right, tolerance=EXACT)
    one_group = rows(batch, slice(0, 4))
    assert agree(ours(one_group, "dapo"), trl_side(one_group, **settings), tolerance=EXACT)


def test_trls_cispo_is_one_mean_over_all_tokens_and_its_epsilon_high_is_our_cap() -> None:
    right = trl_side(fixed_batch(), loss_type="cispo", epsilon_high=2.0)
    overrides = {"objective.trust.weight-clip.cap": 2.0, "aggregate": "token-mean"}
    assert agree(ours(fixed_batch(), "cispo", overrides), right, tolerance=EXACT)


def test_trls_kl_at_sequence_level_is_weighed_by_the_sequence_ratio() -> None:
    """The weight that makes k3 unbiased is each token's own ratio; TRL takes the response's there."""
    batch = fixed_batch()
    right = trl_side(batch, **GSPO, beta=0.04, use_bias_correction_kl=True)
    weighted = {"objective.penalties.kl-ratio-weighted.beta": 0.04}
    assert not agree(ours(batch, "gspo", weighted, ref_logprobs=batch.ref_logprobs), right, tolerance=1e-3)
    plain = trl_side(batch, **GSPO, beta=0.04, use_bias_correction_kl=False)
    left = ours(batch, "gspo", {"objective.penalties.kl.beta": 0.04}, ref_logprobs=batch.ref_logprobs)
    assert agree(left, plain, tolerance=EXACT)


def test_trls_bnpo_depends_on_the_micro_batches_and_ours_does_not() -> None:
    """bnpo divides by the tokens of each micro-batch and averages; ours by those of the whole update."""
    batch = fixed_batch()
    halves = [rows(batch, slice(0, 4)), rows(batch, slice(4, 8))]
    whole = ours(batch, "grpo", {"aggregate": "token-mean"})
    assert agree(whole, trl_side(batch, loss_type="bnpo"), tolerance=EXACT)

    split = [trl_side(half, loss_type="bnpo", accumulation=2) for half in halves]
    theirs = Side(loss=sum(side.loss for side in split), gradient=torch.cat([side.gradient for side in split]))
    assert difference(whole, theirs).gradient > 0.05

    algorithm = legato.algorithm("grpo", {"aggregate": "token-mean"})
    counts = [legato.counts(algorithm, mask=half.mask, group=half.group) for half in halves]
    total = counts[0] + counts[1]
    split = [ours(half, "grpo", {"aggregate": "token-mean"}, counts=total) for half in halves]
    with_total_counts = Side(loss=sum(side.loss for side in split), gradient=torch.cat([side.gradient for side in split]))
    assert agree(whole, with_total_counts, tolerance=EXACT)


def test_advantages_differ_from_trls_by_the_deviation_it_takes() -> None:
    """Ours divides by the deviation of the group itself (ddof 0), so rewards 1 0 1 0 give +-1; TRL's give +-.866."""
    rewards = [1.0, 0.0, 1.0, 0.0] * 2
    advantages = legato.advantages("grpo", rewards=torch.tensor(rewards), group=GROUP).advantages
    trl_values = trl_advantages(rewards, scale_rewards="group")
    torch.testing.assert_close(advantages.abs(), torch.ones(8), rtol=1e-5, atol=0)
    torch.testing.assert_close(trl_values.abs(), torch.full((8,), math.sqrt(3) / 2), rtol=1e-3, atol=0)


def test_a_masked_nan_reaches_trls_loss_and_not_ours() -> None:
    """TRL multiplies by the mask, and NaN times 0 is NaN; ours selects."""
    batch = fixed_batch()
    batch.old_logprobs[~batch.mask] = math.nan
    assert math.isnan(trl_side(batch, **GSPO).loss)
    assert agree(ours(batch, "gspo"), ours(fixed_batch(), "gspo"), tolerance=0.0)
