"""The figures of the gap between sampler and trainer, against the specification's batch V and slow loops."""

import math

import pytest
import torch

import legato
from legato.core.mask import Mask
from legato.core.signals import Signals
from legato.diagnostics.gaps import correction_effect, distribution, effective_share, length_bins, per_response
from legato.training.mismatch import corrections, study
from tests.reference.examples import batch_v


def signals(old: list[list[float]], roll: list[list[float]], mask: list[list[bool]], kept: float | None = None) -> Signals:
    of_old = torch.tensor(old, dtype=torch.float64)
    inside = torch.tensor(mask)
    return Signals(
        mask=Mask(inside, torch.float64),
        logprobs=of_old,
        old_logprobs=of_old,
        sampler_logprobs=torch.tensor(roll, dtype=torch.float64),
        kept_logmass=None if kept is None else torch.full_like(of_old, kept),
        advantages=torch.zeros(len(old), 1, dtype=torch.float64),
        turn=torch.where(inside, 0, -1),
    )


def batch_v_signals() -> Signals:
    batch = batch_v()
    return signals(batch.old, batch.roll, batch.mask)


def test_responses_of_batch_v_have_the_printed_numbers() -> None:
    batch = batch_v_signals()
    responses = per_response(batch.behaviour_log_ratio(), batch.mask)
    assert responses.log_product.exp().tolist() == pytest.approx([1.0408107742, 0.4274149319, 2.0137527075, 5.3655559711])
    assert responses.log_geometric.exp().tolist() == pytest.approx([1.0100501671, 0.7532686565, 1.4190675486, 1.3993390248])
    assert responses.k3.tolist() == pytest.approx([0.0003799842, 0.1024085112, 0.2151891733, 0.5550856647], abs=1e-10)
    assert responses.largest_k2.tolist() == pytest.approx([0.00125, 0.405, 0.32, 1.445])
    assert responses.lengths.tolist() == [4, 3, 2, 5]


def test_batch_v_has_the_printed_divergences_and_effective_sizes() -> None:
    figures = study(legato.algorithm("gspo"), batch_v_signals())
    assert (figures["responses"], figures["tokens"]) == (4, 14)
    assert figures["divergence"]["k1"] == pytest.approx(-0.11214286, abs=1e-8)
    assert figures["divergence"]["k3"] == pytest.approx(0.25103944, abs=1e-8)
    assert figures["divergence"]["chi2_token"] == pytest.approx(2.28970147, abs=1e-8)
    assert figures["divergence"]["effective_sequence"] == pytest.approx(2.294870572729 / 4, abs=1e-10)
    sizes = {name: each["effective"] for name, each in figures["corrections"].items()}
    assert sizes["token uncapped"] == pytest.approx(0.5648737385, abs=1e-9)
    assert sizes["token TIS"] == pytest.approx(0.883402, abs=1e-6)
    assert sizes["token IcePop"] == pytest.approx(0.781929, abs=1e-6)
    assert sizes["product uncapped"] == figures["divergence"]["effective_sequence"]


def test_corrections_of_batch_v_cut_the_expected_weights() -> None:
    effects = study(legato.algorithm("gspo"), batch_v_signals())["corrections"]
    assert set(effects) == set(corrections())
    rho = [math.exp(x) for x in (0.05, -0.02, 0, 0.01, -0.9, 0.03, 0.02, 0.8, -0.1, 1.7, 0, -0.05, 0.02, 0.01)]
    products = [1.0408107742, 0.4274149319, 2.0137527075, 5.3655559711]
    assert effects["token TIS"]["cut"] == 2 / 14 and effects["token MIS"]["cut"] == 2 / 14
    assert effects["token IcePop"]["cut"] == 2 / 14  # one below a half, one above five
    assert effects["token TIS"]["mean"] == pytest.approx(sum(min(x, 2.0) for x in rho) / 14)
    assert effects["token TIS"]["bias"] == pytest.approx(sum(min(x, 2.0) - x for x in rho) / 14)
    assert effects["product TIS"]["cut"] == 2 / 4
    assert effects["product MIS"]["mean"] == pytest.approx((products[0] + products[1]) / 4)
    assert effects["product MIS"]["bias"] == pytest.approx(-(products[2] + products[3]) / 4)
    assert effects["product IcePop"]["cut"] == 2 / 4
    assert effects["geo TIS"]["cut"] == 0.0
    assert effects["geo TIS"]["bias"] == pytest.approx(
        (1.0100501671 + 0.7532686565 + 1.4190675486 + 1.3993390248 - sum(products)) / 4
    )
    assert effects["geo rejection"] == pytest.approx(
        {"unit": "responses", "mean": 0.0, "cut": 1.0, "effective": math.nan, "bias": -sum(products) / 4}, nan_ok=True
    )
    assert effects["k3 rejection"]["cut"] == 3 / 4 and effects["k3 rejection"]["effective"] == pytest.approx(1 / 4)
    assert effects["veto"]["cut"] == 0.0 and effects["veto"]["mean"] == 1.0
    assert {each["unit"] for name, each in effects.items() if name.startswith("token")} == {"tokens"}


def test_the_floor_is_that_of_the_algorithms_own_ratio() -> None:
    gspo, grpo, none = (study(legato.algorithm(name), batch_v_signals())["floor"] for name in ("gspo", "grpo", "reinforce"))
    assert gspo["bounded"] == gspo["max"] == pytest.approx(0.35) and gspo["clipped"] == 1.0 and gspo["safe"] is False
    assert gspo["band"] == 3e-4 and grpo["band"] == 0.2
    assert grpo["bounded"] == pytest.approx(1.7) and grpo["clipped"] == pytest.approx(3 / 14)
    assert none["band"] is None and none["clipped"] is None and none["safe"] is None


def test_a_sampler_that_is_the_trainer_has_no_gap() -> None:
    batch = batch_v()
    figures = study(legato.algorithm("gspo"), signals(batch.old, batch.old, batch.mask))
    assert figures["floor"]["safe"] is True and figures["floor"]["max"] == 0.0 and figures["token_gap"]["deviation"] == 0.0
    assert all(
        each["mean"] == 1.0 and each["cut"] == 0.0 and each["effective"] == 1.0 for each in figures["corrections"].values()
    )


def test_truncation_is_in_the_gap_and_not_in_the_floor() -> None:
    batch = batch_v()
    figures = study(legato.algorithm("gspo"), signals(batch.old, batch.old, batch.mask, kept=math.log(0.9)))
    assert figures["token_gap"]["mean"] == pytest.approx(math.log(0.9)) and figures["floor"]["max"] == 0.0
    assert figures["divergence"]["k1"] == pytest.approx(-math.log(0.9))


def test_a_response_without_a_token_is_left_out() -> None:
    batch = batch_v()
    with_empty = signals([*batch.old, [math.nan] * 5], [*batch.roll, [math.nan] * 5], [*batch.mask, [False] * 5])
    one, other = study(legato.algorithm("gspo"), batch_v_signals()), study(legato.algorithm("gspo"), with_empty)
    assert other["responses"] == 4
    for name in ("corrections", "by_length", "response_gap"):
        assert repr(one[name]) == repr(other[name])


def test_bins_hold_every_response_once_and_say_what_is_cut_in_them() -> None:
    bins = study(legato.algorithm("gspo"), batch_v_signals())["by_length"]
    assert [(each["shortest"], each["longest"], each["responses"]) for each in bins] == [
        (2, 2, 1),
        (3, 3, 1),
        (4, 4, 1),
        (5, 5, 1),
    ]
    assert [each["cut"]["token TIS"] for each in bins] == [0.5, 0.0, 0.0, 0.2]
    assert [each["cut"]["product MIS"] for each in bins] == [1.0, 0.0, 0.0, 1.0]
    lengths = torch.tensor([3.0] * 50 + [7.0, 8.0])
    assert [(low, high, int(member.sum())) for low, high, member in length_bins(lengths)] == [(3, 8, 52)]


def test_a_distribution_has_interpolated_quantiles() -> None:
    figures = distribution(torch.tensor([4.0, 1.0, 2.0, 3.0, 5.0]))
    assert (
        figures["p50"] == 3.0
        and figures["p25"] == 2.0
        and figures["p95"] == pytest.approx(4.8)
        and figures["p01"] == pytest.approx(1.04)
    )
    assert (figures["least"], figures["greatest"], figures["mean"]) == (1.0, 5.0, 3.0)
    assert figures["deviation"] == pytest.approx(math.sqrt(2)) and distribution(torch.tensor([])) == {}


def test_effective_shares_of_the_specification() -> None:
    assert effective_share(torch.ones(4)) == 1.0
    assert effective_share(torch.tensor([4.0, 1.0, 1.0, 1.0])) == pytest.approx(0.644736842105)
    effect = correction_effect(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 2.0]), torch.tensor([3.0, 2.0]))
    assert effect == {"mean": 1.0, "cut": 0.5, "effective": 0.5, "bias": -1.5}
