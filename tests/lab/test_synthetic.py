"""The synthetic studies against closed forms and published numbers."""

import math

import pytest
import torch

from legato.lab import constructed, synthetic
from legato.lab.variance import checks


@pytest.fixture(scope="module")
def study() -> list[synthetic.Simulated]:
    return synthetic.study()


def test_every_explanation_has_the_slope_and_the_gap_expected_of_it(study: list[synthetic.Simulated]) -> None:
    assert [check.what for check in checks(study, synthetic.ROWS) if check.verdict != "as expected"] == []


def test_the_slopes_are_the_printed_ones(study: list[synthetic.Simulated]) -> None:
    """The standard error of a slope over these lengths is 0.005."""
    printed = {"independent": -1.0, "AR(1)": -0.98118, "long memory": -0.79467, "random effect": -0.51585}
    for each in study:
        if each.name in printed:
            assert each.expected_slope == pytest.approx(printed[each.name], abs=1e-4)
            assert each.slope == pytest.approx(printed[each.name], abs=0.02)


def test_autoregressive_gaps_by_length(study: list[synthetic.Simulated]) -> None:
    """The tolerance is four standard errors of 2.2 % each."""
    printed = [3.226291, 3.413125, 3.506563, 3.553281, 3.576641, 3.588320, 3.594160, 3.597080]
    simulated = next(each for each in study if each.name == "AR(1)")
    assert simulated.gaps == pytest.approx(printed, rel=0.09)
    assert simulated.kappa == pytest.approx(3.588, abs=0.15)
    assert simulated.first == pytest.approx(2.6 / 4.6, abs=0.01)


def test_only_length_separates_the_explanations_of_the_published_gap(study: list[synthetic.Simulated]) -> None:
    at = synthetic.LENGTHS.index(512)
    assert [each.gaps[at] for each in study[1:]] == pytest.approx([3.6] * 5, rel=0.09)
    assert study[5].gaps[-1] > 2 * study[1].gaps[-1]


def test_one_band_clips_short_responses_and_a_band_by_length_does_not() -> None:
    """With 20,000 responses the standard error of a quintile is at most 0.007; the published numbers have errors too."""
    fifths = constructed.heterogeneous_lengths()
    assert [each.one_band for each in fifths] == pytest.approx(constructed.QUINTILES, abs=0.02)
    assert [each.by_length for each in fifths] == pytest.approx(constructed.FAIR_QUINTILES, abs=0.02)
    assert [each.longest for each in fifths[:-1]] == pytest.approx([427, 764, 1277, 2280], rel=0.05)
    assert sum(each.one_band for each in fifths) / 5 == pytest.approx(0.15, abs=1e-3)


def test_responses_without_an_advantage_are_in_no_quintile() -> None:
    log_s, lengths = torch.linspace(-1, 1, 40), torch.arange(1, 41)
    advantages = torch.where(torch.arange(40) % 2 == 0, 1.0, 0.0)
    fifths = constructed.quintiles(log_s, advantages, lengths, 0.25)
    assert sum(each.responses for each in fifths) == 20
    # log s rises with length here, so the clipped quarter is the longest.
    assert [each.one_band for each in fifths] == [0, 0, 0, pytest.approx(0.25), 1.0]


def test_hidden_shifts_have_the_printed_ratios() -> None:
    shifts = {(each.length, each.shifted): each for each in constructed.HIDDEN}
    assert shifts[4096, 1].log_s == pytest.approx(-0.00122070, abs=5e-9)
    assert math.exp(shifts[32768, 1].log_s) == pytest.approx(0.99984742, abs=5e-9)
    assert math.exp(shifts[4096, 8].log_product) == pytest.approx(4.2e-18, rel=0.02)
    assert shifts[32768, 1].inside(3e-4, 4e-4) and not shifts[4096, 1].inside(3e-4, 4e-4)


def test_correlated_tokens_are_clipped_by_their_gap_alone() -> None:
    results = constructed.correlated_tokens(rows=2000)
    assert results[0].expected == pytest.approx(0.15)
    for each in results:
        assert each.clipped == pytest.approx(each.expected, abs=4 * math.sqrt(0.3 * 0.7 / 2000))


def test_heavy_tails_keep_the_variance_and_stretch_the_quantiles() -> None:
    results = constructed.heavy_tails(rows=20_000, lengths=(4, 64))
    assert [each.gap for each in results] == pytest.approx([1, 1], abs=0.15)
    assert all(each.beyond > 5 * constructed.NORMAL_BEYOND for each in results)
    assert all(each.quantile > constructed.NORMAL_QUANTILE for each in results)
    assert results[0].beyond > results[1].beyond
