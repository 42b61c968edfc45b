"""Defects of other systems, each as a test. Row numbers refer to the project's list of such defects."""

import math

import pytest
import torch
from torch import Tensor

import legato

B, T = 6, 8


def batch(seed: int = 0, spread: float = 3e-4) -> dict[str, Tensor]:
    """Ragged responses of three groups, with drift about as large as the GSPO band and NaN as padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(B, T, generator=generator, dtype=torch.float64)

    old = -normal().abs() - 0.1
    lengths = torch.tensor([8, 3, 5, 1, 7, 2])
    mask = torch.arange(T) < lengths.unsqueeze(1)
    new = (old + spread * normal()).masked_fill(~mask, torch.nan)
    return {
        "logprobs": new,
        "old_logprobs": old.masked_fill(~mask, torch.nan),
        "sampler_logprobs": old - 0.01 * normal(),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=torch.float64),
        "mask": mask,
        "group": torch.tensor([0, 0, 1, 1, 2, 2]),
    }


def gradient(algorithm: object, **signals: Tensor) -> Tensor:
    leaf = signals.pop("logprobs").clone().requires_grad_()
    legato.loss(algorithm, logprobs=leaf, **signals).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def changed_batch(**changes: Tensor) -> dict[str, Tensor]:
    signals = batch()
    signals.pop("sampler_logprobs")
    return signals | changes


def split_batch(signals: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """The batch in micro-batches of the given numbers of rows."""
    columns = [x.split(sizes) for x in signals.values()]
    return [dict(zip(signals, rows, strict=True)) for rows in zip(*columns, strict=True)]


def test_a_response_weighs_the_same_whatever_its_length() -> None:
    """Rows 1, 10, 17, 20, 23: a sequence ratio under a token sum or mean weighs responses by length."""
    signals = changed_batch(advantages=torch.ones(B, dtype=torch.float64))
    signals["old_logprobs"] = signals["logprobs"].clone()
    per_response = gradient("gspo", **signals).nan_to_num().sum(1)
    torch.testing.assert_close(per_response, torch.full((B,), -1 / B, dtype=torch.float64))


def test_the_published_clip_is_the_default_and_a_wide_one_gets_a_caution() -> None:
    """Row 2: 0.2 on a sequence ratio never clips."""
    from legato.algorithms.cautions import cautions

    clip = legato.algorithm("gspo").objective.trust[0]
    assert (clip.low, clip.high) == (3e-4, 4e-4)
    wide = legato.algorithm("gspo", {"objective.trust.clip.low": 0.2, "objective.trust.clip.high": 0.2})
    assert any("never clips" in sentence for sentence in cautions(wide))


@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "cispo"])
@pytest.mark.parametrize("split", [[1] * 6, [2, 2, 2], [5, 1], [3, 3]])
def test_the_gradient_does_not_depend_on_how_an_update_is_split(name: str, split: list[int]) -> None:
    """Rows 3, 9, 28, 30: losses that depended on accumulation steps, micro-batch size or ranks."""
    signals = changed_batch()
    whole = gradient(name, **signals)
    pieces = split_batch(signals, split)
    counts = sum(legato.counts(name, mask=piece["mask"], group=piece["group"]) for piece in pieces)
    parts = torch.cat([gradient(name, **piece, counts=counts) for piece in pieces])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-15)


def test_tool_tokens_change_nothing_and_get_nothing() -> None:
    """Rows 4, 22, 31: tool masks ignored, padding or masked tokens that leak into sequence statistics."""
    signals = changed_batch()
    signals["mask"] = signals["mask"].clone()
    signals["mask"][0, 3] = False
    expected = gradient("gspo", **signals)
    signals["logprobs"] = signals["logprobs"].clone()
    signals["logprobs"][0, 3] = 1e9
    result = gradient("gspo", **signals)
    assert torch.equal(result, expected)
    assert result[0, 3] == 0


def test_a_correction_beside_a_sequence_ratio_does_not_drop_long_responses() -> None:
    """Rows 5, 24: a product over tokens discards or explodes long responses for a small systematic gap."""
    length = 4000
    old = torch.full((2, length), -1.0, dtype=torch.float64)
    signals = {
        "logprobs": old,
        "old_logprobs": old,
        "sampler_logprobs": old - 0.001,
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
        "mask": torch.ones(2, length, dtype=torch.bool),
    }
    value = legato.algorithm("gspo", {"objective.corrections.mis.cap": 2.0})
    outcome = legato.loss(value, **signals)
    assert outcome.metrics["weight/mean"] == pytest.approx(math.exp(0.001))
    product = legato.algorithm(value, {"objective.corrections.mis.level": "product"})
    assert legato.loss(product, **signals).coefficients.abs().sum() == 0


def test_truncated_sampling_is_corrected_by_the_kept_mass() -> None:
    """Row 6: engine log-probs before truncation against a sampler that truncated: the mean ratio is the kept mass."""
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    signals = {
        "logprobs": old,
        "old_logprobs": old,
        "sampler_logprobs": old,
        "advantages": torch.ones(1, dtype=torch.float64),
        "mask": torch.ones(1, 4, dtype=torch.bool),
    }
    value = legato.algorithm("grpo", {"objective.corrections.decoupled.level": "token"})
    kept_logmass = torch.full((1, 4), math.log(0.9), dtype=torch.float64)
    assert legato.loss(value, **signals).metrics["weight/mean"] == 1.0
    assert legato.loss(value, **signals, kept_logmass=kept_logmass).metrics["weight/mean"] == pytest.approx(0.9)


def test_mismatch_is_measured_before_any_correction_acts() -> None:
    """Rows 7, 16: metrics computed after truncation hide the damage; mismatch not logged beside a correction."""
    signals = batch()
    signals["sampler_logprobs"] = signals["sampler_logprobs"] - 3.0
    plain = legato.loss("gspo", **signals).metrics
    corrected = legato.loss(legato.algorithm("gspo", {"objective.corrections.tis.cap": 2.0}), **signals).metrics
    for key in (key for key in plain if key.startswith("mismatch/")):
        assert plain[key] == pytest.approx(corrected[key], nan_ok=True)
    assert plain["mismatch/above_two"] == 1.0


def test_metrics_of_the_parts_add_up_to_those_of_the_whole() -> None:
    """Row 9: averages of averages over ranks are biased."""
    signals = batch()
    whole = legato.loss("dapo", **signals).metrics
    pieces = split_batch(signals, [4, 1, 1])
    counts = sum(legato.counts("dapo", mask=piece["mask"], group=piece["group"]) for piece in pieces)
    merged = sum(legato.loss("dapo", **piece, counts=counts).sums for piece in pieces).report()
    assert merged.keys() == whole.keys()
    for key, value in whole.items():
        assert merged[key] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("name", ["gspo", "sapo", "grpo", "gmpo", "luspo", "dapo"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_values_outside_the_mask_are_never_read(name: str, garbage: float) -> None:
    """Row 11: masked NaN times zero contaminates sequence-level aggregation."""
    clean, dirty = changed_batch(), changed_batch()
    for key in ("logprobs", "old_logprobs"):
        clean[key] = clean[key].masked_fill(~clean["mask"], 0.0)
        dirty[key] = dirty[key].masked_fill(~dirty["mask"], garbage)
    assert torch.equal(gradient(name, **clean), gradient(name, **dirty))


def test_a_dual_clip_added_to_gspo_has_an_effect() -> None:
    """Rows 13, 19: an option accepted and never read."""
    signals = changed_batch()
    signals["logprobs"] = signals["old_logprobs"] + 2.0
    value = legato.algorithm("gspo", {"objective.trust.dual-clip.cap": 3.0})
    negative = signals["advantages"] < 0
    assert (gradient("gspo", **signals)[negative].nan_to_num() != 0).any()
    assert (gradient(value, **signals)[negative].nan_to_num() == 0).all()


def test_clip_fractions_have_both_sides_and_the_right_denominators() -> None:
    """Rows 14, 21: a lower clip fraction that is always zero, token weights where sequences are meant, shares above one."""
    old = torch.full((4, 6), -1.0, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 2, 2, 2]).unsqueeze(1)
    drift = torch.tensor([0.01, -0.01, 0.0, 0.01], dtype=torch.float64).unsqueeze(1)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    metrics = legato.loss("gspo", logprobs=old + drift, old_logprobs=old, advantages=advantages, mask=mask).metrics
    assert metrics["clip/sequences"] == 2 / 4
    assert metrics["clip/sequences_positive"] == 1 / 2
    assert metrics["clip/sequences_negative"] == 1 / 2
    assert metrics["clip/tokens"] == 8 / 12
    assert metrics["clip/tokens_positive"] == 6 / 8
    assert metrics["clip/tokens_negative"] == 2 / 4
    assert metrics["clip/outside_sequences"] == 3 / 4


@pytest.mark.parametrize("name", ["gspo", "grpo", "gmpo", "seq-product", "cispo", "sapo"])
def test_an_exploding_ratio_is_clipped_without_nan(name: str) -> None:
    """Row 15: an unbounded exponent gives inf, and its gradient NaN."""
    old = torch.full((3, 4), -1.0)
    new = old + torch.tensor([[800.0], [-800.0], [800.0]])
    signals = {"old_logprobs": old, "mask": torch.ones(3, 4, dtype=torch.bool), "group": torch.zeros(3, dtype=torch.long)}
    result = gradient(name, logprobs=new, advantages=torch.tensor([1.0, -1.0, 0.0]), **signals)
    assert torch.isfinite(result).all()
    assert (result[2] == 0).all()


def test_a_correction_on_gspo_acts_and_the_ratio_stays_against_the_anchor() -> None:
    """Row 16: turning the correction on only swapped the anchor; thresholds were ignored."""
    signals = batch()
    signals["sampler_logprobs"] = signals["old_logprobs"] - 0.5
    plain = legato.loss("gspo", **signals)
    corrected = legato.loss(legato.algorithm("gspo", {"objective.corrections.tis.cap": 1.2}), **signals)
    torch.testing.assert_close(corrected.coefficients, 1.2 * plain.coefficients)
    assert corrected.metrics["ratio/sequence_mean"] == plain.metrics["ratio/sequence_mean"]


def test_filtered_responses_leave_the_loss_under_every_aggregation() -> None:
    """Rows 21, 31: samples filtered by a final mask, or dropped, that still trained."""
    signals = changed_batch()
    keep = torch.tensor([1, 0, 1, 1, 0, 1])
    for aggregate in ("token-mean", "group-token-mean", "sequence-mean", "sequence-sum"):
        value = legato.algorithm("grpo", {"aggregate": aggregate})
        result = gradient(value, **signals, keep=keep)
        assert (result[keep == 0].nan_to_num() == 0).all()
        assert torch.equal(result[keep == 1].nan_to_num(), gradient(value, **signals)[keep == 1].nan_to_num())


def test_token_mean_counts_mask_tokens_only() -> None:
    """Row 21: a token mean that ignores the mask."""
    signals = changed_batch(advantages=torch.ones(B, dtype=torch.float64))
    signals["old_logprobs"] = signals["logprobs"].clone()
    result = gradient(legato.algorithm("grpo", {"aggregate": "token-mean"}), **signals)
    assert result.nan_to_num().sum() == pytest.approx(-1.0)


def test_each_response_is_divided_by_its_own_length() -> None:
    """Row 26: a missing parenthesis made a B x B matrix, each response divided by every length."""
    signals = changed_batch()
    log_ratio = legato.loss("gspo", **signals, metrics=False).trace.log_ratio
    assert log_ratio.shape == (B, 1)
    rows = [(n - o)[m].mean() for n, o, m in zip(signals["logprobs"], signals["old_logprobs"], signals["mask"], strict=True)]
    torch.testing.assert_close(log_ratio.squeeze(1), torch.stack(rows))


def test_an_unknown_algorithm_is_refused_with_the_nearest_name() -> None:
    """Row 29: naming GSPO wrongly died inside a compiled kernel."""
    with pytest.raises(ValueError, match="did you mean 'gspo-token'"):
        legato.algorithm("gspo_tokens")


def test_the_divergence_from_the_reference_has_a_gradient() -> None:
    """Row 30: a KL loss that ran without gradient."""
    signals = changed_batch(advantages=torch.zeros(B, dtype=torch.float64))
    reference = signals["old_logprobs"] - 0.3
    value = legato.algorithm("gspo", {"objective.penalties.kl.beta": 0.04})
    result = gradient(value, **signals, ref_logprobs=reference)
    assert (result[signals["mask"]] != 0).all()


def test_half_precision_is_refused_and_float32_keeps_the_band() -> None:
    """The band dies in half precision: 0.9997, 1 and 1.0004 are one number in bfloat16."""
    old = torch.full((2, 50), -1.0)
    new = old + torch.tensor([[1.00035], [1.00045]]).log()
    signals = {"old_logprobs": old, "advantages": torch.ones(2), "mask": torch.ones(2, 50, dtype=torch.bool)}
    outcome = legato.loss("gspo", logprobs=new, **signals)
    assert (outcome.coefficients[0] != 0).all()
    assert (outcome.coefficients[1] == 0).all()
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="half precision"):
            legato.loss("gspo", logprobs=new.to(dtype), **signals)


def test_an_update_with_nothing_in_it_is_a_no_op_and_not_nan() -> None:
    """Row 9: all responses truncated or masked."""
    signals = changed_batch()
    signals["mask"] = torch.zeros(B, T, dtype=torch.bool)
    for name in ("gspo", "grpo", "dapo", "dr-grpo", "reinforce", "gepo"):
        value = legato.algorithm(name, {"aggregate.constant": 8.0} if name == "dr-grpo" else None)
        outcome = legato.loss(value, **signals)
        assert outcome.loss.item() == 0
        assert (outcome.coefficients == 0).all()
