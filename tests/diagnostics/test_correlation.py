"""Simulated tokens, the spread of log s over lengths, and the ratio as a quotient of perplexities."""

import math
from dataclasses import replace

import pytest
import torch

from legato.diagnostics.equivalence import implied_entropy, likelihoods, quotient_of_means
from legato.diagnostics.statistics.correlation import processes
from legato.diagnostics.statistics.spread import Bin, fit_explanations, intercept, spread, weighted_slope

GAP, AT = 3.6, 512


def covariance_gap(name: str, length: int) -> float:
    """1' C 1 / L of the correlation matrix C, by two loops."""
    phi, rho, block = 2.6 / 4.6, 2.6 / 511, 2.6 / 15
    hurst, drift = 0.5 + math.log(3.6) / (2 * math.log(512)), 2.6 / 512
    total = 0.0
    for a in range(length):
        for b in range(length):
            k = abs(a - b)
            total += {
                "independent": float(k == 0),
                "AR(1)": phi**k,
                "equicorrelated": 1.0 if k == 0 else rho,
                "blocks of 16": 1.0 if k == 0 else block * (a // 16 == b // 16),
                "long memory": 0.5 * ((k + 1) ** (2 * hurst) - 2 * k ** (2 * hurst) + abs(k - 1) ** (2 * hurst)),
                "random effect": float(k == 0) + drift,
            }[name]
    return total / length


@pytest.mark.parametrize("name", list(processes(GAP, AT)))
def test_the_gap_of_every_process_is_the_sum_of_its_correlations(name: str) -> None:
    process = processes(GAP, AT)[name]
    for length in (1, 7, 16, 40):
        assert process.gap(length) == pytest.approx(covariance_gap(name, length), rel=1e-9)


@pytest.mark.parametrize("name", [name for name in processes(GAP, AT) if name != "independent"])
def test_every_process_explains_the_gap_at_its_length(name: str) -> None:
    process = processes(GAP, AT)[name]
    assert process.gap(AT) == pytest.approx(3.588320 if name == "AR(1)" else 3.6, abs=1e-6)


@pytest.mark.parametrize("name", list(processes(GAP, AT)))
def test_simulated_tokens_have_the_expected_variance_and_gap(name: str) -> None:
    """Four standard errors of a variance over 4,000 responses are 9 %."""
    process = processes(GAP, AT)[name]
    tokens = process.tokens(4000, 64, 0.02, torch.Generator().manual_seed(1))
    assert tokens.shape == (4000, 64)
    assert float(tokens.var()) == pytest.approx(4e-4, rel=0.03)
    assert float(tokens.mean(1).var()) / (4e-4 / 64) == pytest.approx(process.gap(64), rel=0.09)


def make_responses(name: str, sigma: float = 0.02, rows: int = 600) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-ratios [rows, 512], mask and batch numbers of responses of six lengths."""
    generator = torch.Generator().manual_seed(0)
    process = processes(GAP, AT)[name]
    lengths = [16, 32, 64, 128, 256, 512]
    table, mask = torch.zeros(rows * 6, 512, dtype=torch.float64), torch.zeros(rows * 6, 512, dtype=torch.bool)
    for place, length in enumerate(lengths):
        here = slice(place * rows, (place + 1) * rows)
        table[here, :length] = process.tokens(rows, length, sigma, generator)
        mask[here, :length] = True
    # Values outside the mask must not be read.
    return torch.where(mask, table, math.nan), mask, torch.zeros(len(table), dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "best", "slope"),
    [
        ("AR(1)", "short-range correlation", -0.98),
        ("random effect", "drift between responses", -0.67),
        ("long memory", "long memory", -0.795),
    ],
)
def test_the_process_that_generated_the_tokens_fits_best(name: str, best: str, slope: float) -> None:
    result = spread(*make_responses(name))
    assert result.fits[0].name == best and best in result.verdict
    assert result.slope == pytest.approx(slope, abs=0.06)
    assert result.bins[-1].gap == pytest.approx(3.6, rel=0.25)
    assert result.bins[-1].effective_tokens == pytest.approx(512 / result.bins[-1].gap)


def test_independent_tokens_are_recognised() -> None:
    result = spread(*make_responses("independent"))
    assert result.verdict.startswith("independent tokens")
    assert result.gap == pytest.approx(1, abs=0.1)
    assert result.sigma == pytest.approx(0.02, rel=0.01)
    assert result.kappa == pytest.approx(1, abs=0.05)


def test_a_gap_too_small_for_each_bin_is_detected_over_all_bins() -> None:
    """Eight bins at a gap of 1.5, each within two standard errors of 1."""
    lengths, sigma2 = [16.0, 23, 32, 45, 64, 91, 128, 181], 4e-4
    wide = [replace(each, distinct=40) for each in make_bins([1.5 * sigma2 / n for n in lengths], lengths, sigma2)]
    assert all(each.gap - 1 < 2 * each.gap_error for each in wide)
    result = replace(
        spread(*make_responses("independent", rows=20)),
        bins=tuple(wide),
        fits=fit_explanations(wide, sigma2),
        gap=1.5,
        slope=-1.0,
    )
    assert result.verdict.startswith("short-range correlation") and "may fall as 1/L" in result.verdict
    few = tuple(replace(each, distinct=4) for each in wide)
    assert replace(result, bins=few, fits=fit_explanations(few, sigma2)).verdict.startswith(
        "independent tokens cannot be ruled out"
    )


def test_the_longest_responses_of_a_small_batch_keep_their_spread() -> None:
    """The subtracted batch mean includes the response itself; the longest of four contributes the most."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 8, 16, 48]).repeat(400)
    mask = torch.arange(48) < lengths.unsqueeze(1)
    ratios = 0.02 * torch.randn(len(lengths), 48, generator=generator, dtype=torch.float64)
    result = spread(torch.where(mask, ratios, math.nan), mask, torch.arange(400).repeat_interleave(4))
    assert result.bins[-1].shortest == 48 and result.bins[-1].gap == pytest.approx(1, abs=0.2)
    assert (
        not result.bins[-1].differs_from_one
        and replace(result.bins[-1], variance=3 * result.bins[-1].variance).differs_from_one
    )
    assert result.verdict.startswith("independent tokens") and "too few" in result.verdict


def test_too_few_lengths_give_no_slope_and_no_tau() -> None:
    ratios, mask, batch = make_responses("independent", rows=20)
    result = spread(ratios[:20], mask[:20], batch[:20])
    assert len(result.bins) == 1 and math.isnan(result.tau) and math.isnan(result.slope)


def test_the_mean_of_an_update_does_not_count_as_spread() -> None:
    """Two updates with different means: the spread is measured within each."""
    ratios, mask, batch = make_responses("independent", rows=200)
    batch[::2] = 1
    moved = ratios + torch.where(batch == 1, 0.5, -0.5).unsqueeze(1)
    assert spread(moved, mask, batch).gap == pytest.approx(spread(ratios, mask, batch).gap, rel=0.05)


def make_bins(variances: list[float], lengths: list[float], sigma2: float) -> list[Bin]:
    return [
        Bin(shortest=int(n), longest=int(n), length=n, responses=1000, distinct=1000, variance=v, independent=sigma2 / n)
        for v, n in zip(variances, lengths, strict=True)
    ]


def test_fits_find_the_parameters_of_exact_variances() -> None:
    lengths, sigma2 = [16.0, 64.0, 256.0, 1024.0], 4e-4
    short = fit_explanations(make_bins([sigma2 * 3.6 / n for n in lengths], lengths, sigma2), sigma2)[0]
    assert (short.name, short.misfit) == ("short-range correlation", pytest.approx(0, abs=1e-6))
    assert short.parameter == pytest.approx(3.6, rel=1e-4)
    drift = make_bins([1e-6 + sigma2 / n for n in lengths], lengths, sigma2)
    assert fit_explanations(drift, sigma2)[0].parameter == pytest.approx(1e-3, rel=1e-3)
    assert intercept(drift) == pytest.approx(1e-6, rel=1e-9)
    long = make_bins([sigma2 * n ** (2 * 0.6 - 2) for n in lengths], lengths, sigma2)
    assert fit_explanations(long, sigma2)[0].parameter == pytest.approx(0.6, rel=1e-4)
    assert weighted_slope(long)[0] == pytest.approx(-0.8, abs=1e-9)


def test_standard_errors_account_for_heavy_tails_and_duplicate_responses() -> None:
    plain = make_bins([1e-4], [16.0], 4e-4)[0]
    assert plain.relative_error == pytest.approx(math.sqrt(2 / 999))
    ratios, mask, batch = make_responses("independent", rows=100)
    twice = spread(*(torch.cat([table, table]) for table in (ratios, mask, batch)))
    once = spread(ratios, mask, batch)
    assert [each.distinct for each in twice.bins] == [each.distinct for each in once.bins]
    assert twice.slope_error == pytest.approx(once.slope_error, rel=0.01)
    ratios[3, 0] = 5.0  # one token moved far
    assert max(each.kurtosis for each in spread(ratios, mask, batch).bins) > 30


def test_the_ratio_is_the_quotient_of_perplexities_of_each_response() -> None:
    generator = torch.Generator().manual_seed(4)
    old = -torch.rand(50, 30, generator=generator, dtype=torch.float64) * 3
    new = old + 0.4 * torch.randn(50, 30, generator=generator, dtype=torch.float64)
    mask = torch.arange(30) < torch.randint(1, 31, (50, 1), generator=generator)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        values = likelihoods(new.to(dtype), old.to(dtype), mask)
        assert float(values.error.max()) < bound
        for row in (0, 17, 49):
            inside = [t for t in range(30) if mask[row, t]]
            s = math.exp(math.fsum(float(new[row, t] - old[row, t]) for t in inside) / len(inside))
            assert float(values.s[row]) == pytest.approx(s, rel=10 * bound)
            assert float((values.entropy_new - values.entropy_old).exp()[row]) == pytest.approx(1 / s, rel=10 * bound)
    mean, of_means = quotient_of_means(likelihoods(new, old, mask))
    assert abs(mean - of_means) > 1e-3


def test_the_published_totals_agree_with_only_one_entropy() -> None:
    entropy = implied_entropy(-0.752, -0.816)
    assert entropy == pytest.approx(1.70873, abs=1e-5)
    assert math.exp(entropy) == pytest.approx(5.5220, abs=1e-4)
    assert math.exp(entropy * (1 - 0.816)) == pytest.approx(1.3694, abs=1e-4)
    assert math.exp(entropy * 0.816) == pytest.approx(4.0323, abs=1e-4)
