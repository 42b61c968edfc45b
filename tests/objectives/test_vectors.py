"""The 39 vectors of the specification through `legato.loss`, float64, to 1e-10."""

from typing import Any

import pytest
import torch

import legato
from tests.proof.batches import keep_fields
from tests.proof.bridge import evaluate
from tests.reference.examples import LENGTHS, VECTORS, batch_v

CLIP = "objective.trust.clip"
CORRECTION = "objective.corrections"

# name of the vector: (algorithm, overrides, fields it needs besides, advantages of batch V)
CONFIGURED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "reinforce": ("reinforce", {}, (), "A"),
    "ppo_token_adv": ("ppo", {"objective.penalties": []}, (), "A_tok"),
    "grpo": ("grpo", {}, (), "A"),
    "grpo_kl": ("grpo", {"objective.penalties.kl.beta": 0.04}, ("ref",), "A"),
    "dr_grpo": ("dr-grpo", {"aggregate.constant": 8}, (), "A"),
    "dapo": ("dapo", {}, (), "A"),
    "dual_clip": ("dapo", {"objective.trust.dual-clip.cap": 3.0}, (), "A"),
    "gspo": ("gspo", {}, (), "A"),
    "gspo_token_uniform": ("gspo-token", {}, (), "A"),
    "gspo_token_tokenmean": ("gspo-token", {"aggregate": "token-mean"}, (), "A"),
    "gspo_token_A_tok": ("gspo-token", {}, (), "A_tok"),
    "turn_gspo": ("turn-gspo", {f"{CLIP}.low": 0.05, f"{CLIP}.high": 0.06}, ("turn",), "A_turn"),
    "gmpo": ("gmpo", {}, (), "A"),
    "rspo_v2": ("rspo", {}, ("gamma",), "A"),
    "rspo_v1": ("rspo", {f"{CORRECTION}.router-shift.placement": "after-clip"}, ("gamma",), "A"),
    "rs_gspo": ("gspo", {f"{CORRECTION}.router-shift.placement": "before-clip"}, ("gamma",), "A"),
    "rs_grpo": ("grpo", {f"{CORRECTION}.router-shift.placement": "before-clip"}, ("gamma",), "A"),
    "cispo_hi0.2": ("cispo", {"objective.trust.weight-clip.cap": 1.2}, (), "A"),
    "cispo_cap5": ("cispo", {}, (), "A"),
    "sapo": ("sapo", {}, (), "A"),
    "luspo": ("luspo", {}, (), "A"),
    "fspo_c.05_.06": (
        "fspo",
        {"objective.trust.log-clip.log_low": 0.05, "objective.trust.log-clip.log_high": 0.06},
        (),
        "A",
    ),
    "seq_product": ("seq-product", {}, (), "A"),
    "gepo": ("gepo", {}, (), "A"),
    "vespo": ("vespo", {}, (), "A"),
    "opsm_d.05": (
        "grpo",
        {"objective.trust.opsm.threshold": 0.05, "objective.trust.opsm.anchor": "old"},
        (),
        "A",
    ),
    "dppo_tv_.15": (
        "dppo",
        {"objective.ratio.anchor": "old", "objective.trust.divergence-mask.anchor": "old"},
        (),
        "A",
    ),
    "kl_cov_k2": (
        "dapo",
        {
            "objective.trust": [],
            "objective.penalties.kl-cov.fraction": 0.15,
            "objective.penalties.kl-cov.beta": 1.0,
            "aggregate": "token-mean",
        },
        (),
        "A",
    ),
    "clip_cov_.5_2": (
        "dapo",
        {
            f"{CLIP}.low": 1.0,
            f"{CLIP}.high": 1.0,
            "objective.trust.clip-cov.low": 0.5,
            "objective.trust.clip-cov.high": 2.0,
            "objective.trust.clip-cov.selection": "all",
            "aggregate": "token-mean",
        },
        (),
        "A",
    ),
    "tis_token_C2": ("dapo", {f"{CORRECTION}.tis.level": "token"}, ("roll",), "A"),
    "mis_token_C2": ("dapo", {f"{CORRECTION}.mis.level": "token"}, ("roll",), "A"),
    "icepop_.5_5": ("dapo", {f"{CORRECTION}.icepop.level": "token"}, ("roll",), "A"),
    "tis_seq_C2": ("dapo", {f"{CORRECTION}.tis.level": "product"}, ("roll",), "A"),
    "mis_seq_C2": ("dapo", {f"{CORRECTION}.mis.level": "product"}, ("roll",), "A"),
    "geo_rs_keepdenom": (
        "dapo",
        {f"{CORRECTION}.geo-rejection.floor": 0.9, f"{CORRECTION}.geo-rejection.cap": 1.1},
        ("roll",),
        "A",
    ),
    "geo_rs_shrinkdenom": (
        "dapo",
        {
            f"{CORRECTION}.geo-rejection.floor": 0.9,
            f"{CORRECTION}.geo-rejection.cap": 1.1,
            "aggregate.denominator": "kept",
        },
        ("roll",),
        "A",
    ),
    "decoupled_ppo": ("dapo", {f"{CORRECTION}.decoupled.level": "token"}, ("roll",), "A"),
    "bypass_ppo_clip": ("dapo", {"objective.ratio.anchor": "sampler"}, ("roll",), "A"),
    "mask_form_pg": ("minirl", {}, ("roll",), "A"),
}


def test_every_vector_is_covered() -> None:
    assert set(CONFIGURED) == set(VECTORS)


@pytest.mark.parametrize("name", VECTORS)
def test_the_loss_reproduces_the_vector(name: str) -> None:
    algorithm, overrides, needs, advantages = CONFIGURED[name]
    unit = "sequence" if advantages == "A" else "token"
    evaluation = evaluate(legato.algorithm(algorithm, overrides), keep_fields(batch_v(advantages), *needs), unit)
    assert evaluation.loss == pytest.approx(VECTORS[name]["loss"], abs=1e-10)
    for row, (printed, length) in enumerate(zip(VECTORS[name]["grad"], LENGTHS, strict=True)):
        assert evaluation.gradient[row][:length] == pytest.approx(printed, abs=1e-10)
        assert evaluation.coefficients[row][:length] == pytest.approx([-entry for entry in printed], abs=1e-10)
        assert not any(evaluation.gradient[row][length:])


@pytest.mark.parametrize("name", VECTORS)
def test_the_vector_survives_float32(name: str) -> None:
    algorithm, overrides, needs, advantages = CONFIGURED[name]
    unit = "sequence" if advantages == "A" else "token"
    batch = keep_fields(batch_v(advantages), *needs)
    evaluation = evaluate(legato.algorithm(algorithm, overrides), batch, unit, torch.float32)
    assert evaluation.outcome.loss.dtype == torch.float32
    assert evaluation.loss == pytest.approx(VECTORS[name]["loss"], rel=1e-5, abs=1e-6)
    for row, (printed, length) in enumerate(zip(VECTORS[name]["grad"], LENGTHS, strict=True)):
        assert evaluation.gradient[row][:length] == pytest.approx(printed, rel=1e-5, abs=1e-7)


def test_gspo_with_a_truncated_sequence_weight() -> None:
    algorithm = legato.algorithm("gspo", {f"{CORRECTION}.tis.cap": 1.2, f"{CORRECTION}.tis.level": "sequence"})
    assert evaluate(algorithm, keep_fields(batch_v(), "roll")).loss == pytest.approx(0.016177749014, abs=1e-10)


def test_the_report_counts_clipped_sequences_and_averages_their_ratios() -> None:
    metrics = evaluate("gspo", keep_fields(batch_v())).outcome.metrics
    assert metrics["clip/sequences"] == pytest.approx(0.5)
    ratios = [1.000250031253, 0.895834135297, 1.105170918076, 1.268709192825]
    assert metrics["ratio/sequence_mean"] == pytest.approx(sum(ratios) / 4, abs=1e-9)
