"""Published numbers: routing, variance against length, clip fractions, worked examples."""

import math

import pytest
import torch
from torch import Tensor

import legato
from legato.diagnostics.metrics.routing import any_flip, flip_rate, jaccard_distance, replayed_gates, router_shift
from legato.diagnostics.statistics.clipping import (
    calibrated_width,
    predicted_clip_fraction,
    product_range,
    quantile_bound,
    widths,
)
from legato.diagnostics.statistics.variance import (
    autoregressive_kappa,
    explanations_of_gap,
    integrated_autocorrelation,
    log_slope,
    predicted_variance,
)

OLD_LOGITS = torch.tensor([[1, 0.5, 0, -0.5], [0.2, 0.9, -0.3, 0.4]], dtype=torch.float64)
NEW_LOGITS = torch.tensor([[0.8, 0.7, 0.1, -0.5], [0.5, 0.6, -0.3, 0.4]], dtype=torch.float64)
PHI = 2.6 / 4.6


def test_the_router_shift_of_the_two_layer_example() -> None:
    active = OLD_LOGITS.topk(2).indices
    old, new = (logits.log_softmax(-1).gather(-1, active) for logits in (OLD_LOGITS, NEW_LOGITS))
    assert float(router_shift(old, new)) == pytest.approx(0.839457020769, abs=1e-12)
    assert float(router_shift(old, old)) == 1.0


def test_the_flips_of_the_two_layer_example() -> None:
    old, new = OLD_LOGITS.topk(2).indices, NEW_LOGITS.topk(2).indices
    assert float(flip_rate(old, new).mean()) == 0.25
    assert float(any_flip(old, new).mean()) == 0.5
    assert float(jaccard_distance(old, new).mean()) == pytest.approx(1 / 3)
    assert float(flip_rate(old, old.flip(-1)).sum()) == 0


def test_replayed_gates_follow_the_live_logits_over_the_forced_set() -> None:
    own, forced = (replayed_gates(NEW_LOGITS[1], torch.tensor(experts)) for experts in ([1, 0], [1, 3]))
    assert own.tolist() == pytest.approx([0.524979187479, 0.475020812521], abs=1e-11)
    assert forced.tolist() == pytest.approx([0.549833997312, 0.450166002688], abs=1e-11)


def test_kappa_of_autoregressive_tokens() -> None:
    lengths = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)
    printed = (2.860286, 3.226291, 3.413125, 3.506563, 3.553281, 3.576641, 3.588320, 3.594160, 3.598540)
    assert [autoregressive_kappa(PHI, n) for n in lengths] == pytest.approx(printed, abs=1e-6)
    by_phi = {0.0: 1, 0.2: 1.4988, 0.3: 1.8548, 0.5: 2.9922, 0.7: 5.6363, 0.8: 8.9219, 0.9: 18.6484, 0.95: 37.5156}
    for phi, kappa in by_phi.items():
        assert autoregressive_kappa(phi, 512) == pytest.approx(kappa, abs=1e-4)


def test_other_explanations_of_the_same_gap() -> None:
    parameters = explanations_of_gap(3.6, 512)
    assert parameters["autoregressive_phi"] == pytest.approx(0.565217391304)
    assert parameters["equal_correlation"] == pytest.approx(0.00508806, abs=1e-8)
    assert parameters["block_correlation_16"] == pytest.approx(0.17333, abs=1e-5)
    assert parameters["hurst"] == pytest.approx(0.602666, abs=1e-6)
    assert parameters["drift_share"] == pytest.approx(2.6 / 512)


def test_slopes_distinguish_the_explanations() -> None:
    lengths = 2.0 ** torch.arange(4, 12)
    kappas = torch.tensor([autoregressive_kappa(PHI, int(n)) for n in lengths])
    hurst = explanations_of_gap(3.6, 512)["hurst"]
    assert log_slope(lengths, 1 / lengths) == pytest.approx(-1)
    assert log_slope(lengths, kappas / lengths) == pytest.approx(-0.98118, abs=1e-4)
    assert log_slope(lengths, lengths ** (2 * hurst - 2)) == pytest.approx(-0.79467, abs=1e-5)
    drift = predicted_variance(1.0, math.sqrt(2.6 / 512), 1.0, lengths)
    assert log_slope(lengths, drift) == pytest.approx(-0.51585, abs=1e-4)


def autoregressive(rows: int, length: int, phi: float, generator: torch.Generator) -> Tensor:
    """[rows, length] AR(1) tokens of unit variance."""
    noise = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    tokens = torch.empty_like(noise)
    tokens[:, 0] = noise[:, 0]
    for t in range(1, length):
        tokens[:, t] = phi * tokens[:, t - 1] + math.sqrt(1 - phi**2) * noise[:, t]
    return tokens


def test_simulated_correlation_has_the_predicted_gap_and_kappa() -> None:
    """The tolerance is four standard errors: a variance over 4,000 responses has a relative error of 2.2 %."""
    generator = torch.Generator().manual_seed(0)
    for length in (16, 128, 512):
        tokens = 0.02 * autoregressive(4000, length, PHI, generator)
        gap = float(tokens.mean(1).var() / (0.02**2 / length))
        assert gap == pytest.approx(autoregressive_kappa(PHI, length), rel=0.09)
    kappa, first = integrated_autocorrelation(tokens, torch.ones(4000, 512, dtype=torch.bool))
    assert kappa == pytest.approx(3.588, abs=0.15)
    assert first == pytest.approx(PHI, abs=0.01)


@pytest.mark.parametrize(
    ("deviation", "printed"),
    [
        (3.4e-4, [0.498827, 0.488268, 0.384334, 0.188793, 0.001635, 0, 0, 0, 0]),
        (1e-3, [0.499601, 0.496011, 0.460172, 0.382089, 0.158655, 0.001350, 0, 0, 0]),
        (1e-2, [0.499960, 0.499601, 0.496011, 0.488034, 0.460172, 0.382088, 0.158650, 0.001359, 0]),
    ],
)
def test_the_predicted_clip_fractions_of_the_sweep(deviation: float, printed: list[float]) -> None:
    sweep = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    assert [predicted_clip_fraction(e, e, deviation) for e in sweep] == pytest.approx(printed, abs=2e-6)


def test_the_published_fifteen_per_cent_implies_a_deviation() -> None:
    assert predicted_clip_fraction(3e-4, 4e-4, 3.339e-4) == pytest.approx(0.15, abs=1e-4)
    # If the first of four updates never clips, the others clip 20 %.
    assert predicted_clip_fraction(3e-4, 4e-4, 4.13e-4) == pytest.approx(0.20, abs=2e-4)
    assert predicted_clip_fraction(0.2, 0.2, 3.4e-4) == 0


def test_the_published_clip_fractions_are_consistent_at_these_lengths() -> None:
    """0.26 % of the tokens at |lw| = 0.3 give the token deviation; the width that clips 15 % gives the length."""
    deviation = math.sqrt(0.0026 * 0.3**2)
    assert deviation == pytest.approx(0.0153, abs=5e-5)
    width = math.expm1(1.036433 * 3.34e-4)
    for kappa, length in ((1.0, 2098), (3.6, 7554)):
        assert calibrated_width(0.15, 0.0153, kappa, length) == pytest.approx(width, rel=1e-3)


def test_the_measured_clip_fraction_is_the_predicted_one() -> None:
    generator = torch.Generator().manual_seed(3)
    log_s = 3.339e-4 * torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
    sign = torch.randint(0, 2, (20_000,), generator=generator).double() * 2 - 1
    old = torch.full((20_000, 3), -1.0, dtype=torch.float64)
    mask = torch.ones(20_000, 3, dtype=torch.bool)
    metrics = legato.loss("gspo", logprobs=old + log_s, old_logprobs=old, advantages=sign, mask=mask).metrics
    assert metrics["clip/sequences"] == pytest.approx(0.15, abs=0.01)


def test_the_calibrated_width_by_length() -> None:
    printed = {128: 2.66e-3, 512: 1.33e-3, 2048: 6.65e-4, 8192: 3.32e-4, 32768: 1.66e-4}
    for length, width in printed.items():
        assert calibrated_width(0.15, 0.0153, 3.6, length) == pytest.approx(width, rel=5e-3)


ADVANTAGES = torch.tensor([1, -1, 1, -1, 1, 1, -1, -1, 0, 1], dtype=torch.float64)
LOG_S = torch.tensor([5, 2, -3, -6, 1, 9, -1, 4, 7, 2], dtype=torch.float64) * 1e-4


@pytest.mark.parametrize(("share", "bound"), [(0.2, 5.4e-4), (0.15, 5.8e-4), (1 / 3, 3.0e-4)])
def test_the_bound_that_clips_a_share(share: float, bound: float) -> None:
    assert quantile_bound(LOG_S, ADVANTAGES, share) == pytest.approx(bound, rel=1e-6)


def test_the_bound_as_widths_and_with_lengths() -> None:
    low, high = widths(5.4e-4)
    assert (high, low) == pytest.approx((5.401458262e-4, 5.398542262e-4), rel=1e-9)
    lengths = torch.tensor([100, 400, 100, 900, 1600, 400, 100, 100, 50, 2500], dtype=torch.float64)
    constant = quantile_bound(LOG_S, ADVANTAGES, 0.2, lengths=lengths)
    assert constant == pytest.approx(0.0132)
    assert constant / math.sqrt(2500) == pytest.approx(2.64e-4)


def test_the_worked_example_with_two_outliers() -> None:
    """510 tokens unchanged, one ratio of 1.9 and one of 0.4: outside the band, yet not clipped if A > 0."""
    shift = torch.zeros(2, 512, dtype=torch.float64)
    shift[:, 0], shift[:, 1] = math.log(1.9), math.log(0.4)
    old = torch.full((2, 512), -1.0, dtype=torch.float64)
    signals = {
        "logprobs": old + shift,
        "old_logprobs": old,
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
        "mask": torch.ones(2, 512, dtype=torch.bool),
    }
    sequence = legato.loss("gspo", **signals)
    assert sequence.metrics["ratio/sequence_mean"] == pytest.approx(0.999464134163, abs=1e-12)
    assert sequence.metrics["clip/outside_sequences"] == 1
    assert (sequence.coefficients[0] != 0).all()
    assert (sequence.coefficients[1] == 0).all()
    token = legato.loss(legato.algorithm("grpo", {"aggregate": "sequence-sum"}), **signals).coefficients[0] * 2
    assert token[0] == 0
    assert float(token[1]) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("length", "shifted", "s", "log10_product"),
    [
        (4096, 1, 0.99878004, math.log10(6.7379e-3)),
        (32768, 1, 0.99984742, math.log10(6.7379e-3)),
        (4096, 8, 0.99028190, -17.37),
    ],
)
def test_large_shifts_hide_in_the_mean(length: int, shifted: int, s: float, log10_product: float) -> None:
    shift = torch.where(torch.arange(length) < shifted, -5.0, 0.0).unsqueeze(0).double()
    old = torch.full_like(shift, -1.0)
    mask, advantages = torch.ones_like(shift, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    metrics = legato.loss("gspo", logprobs=old + shift, old_logprobs=old, advantages=advantages, mask=mask).metrics
    assert metrics["ratio/sequence_mean"] == pytest.approx(s, abs=5e-9)
    assert metrics["ratio/token_log_max"] == pytest.approx(5)
    assert float(shift.sum()) / math.log(10) == pytest.approx(log10_product, abs=5e-3)


def test_product_ranges() -> None:
    assert 10 ** product_range(0.2, 0.2, 10)[0] == pytest.approx(0.1073741824)
    assert 10 ** product_range(0.2, 0.2, 10)[1] == pytest.approx(6.1917364224)
    assert product_range(0.2, 0.2, 1000) == pytest.approx((-96.91, 79.18), abs=5e-3)
    assert [10**x for x in product_range(3e-4, 4e-4, 1000)] == pytest.approx([0.741, 1.492], abs=5e-4)
    assert [10**x for x in product_range(3e-4, 4e-4, 8192)] == pytest.approx([0.0856, 26.5], rel=2e-3)


def test_effective_sizes_of_plain_weights() -> None:
    from legato.core.sums import EffectiveSize

    weights = torch.tensor([4.0, 1, 1, 1], dtype=torch.float64)
    share = EffectiveSize(weights.sum(), weights.square().sum(), torch.tensor(4.0)).report()[""]
    assert share == pytest.approx(0.644736842105)


Z, Z_REF = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64), torch.tensor([0.0, 0.3, -0.2], dtype=torch.float64)
REVERSE = [-0.005022382991, -0.153773938804, 0.158796321794]
FORWARD = [0.021986704486, -0.175923738328, 0.153937033842]


@pytest.mark.parametrize(
    ("changes", "value", "gradient"),
    [
        ({"objective.penalties.kl.estimator": "k1"}, 0.082224645920, [0, 0, 0]),
        ({"objective.penalties.kl.estimator": "k2"}, 0.081271892198, REVERSE),
        ({"objective.penalties.kl.estimator": "k3"}, 0.082224645920, FORWARD),
        ({"objective.penalties.kl-straight-through.beta": 1.0}, 0.082224645920, REVERSE),
        ({"objective.penalties.kl-ratio-weighted.estimator": "k3"}, 0.082224645920, REVERSE),
    ],
)
def test_the_gradient_of_each_divergence_in_expectation(
    changes: dict[str, object], value: float, gradient: list[float]
) -> None:
    """All three tokens of a distribution, weighted by their probability."""
    z = Z.clone().requires_grad_()
    logprobs = z.log_softmax(0).unsqueeze(1)
    part = next(iter(changes)).rsplit(".", 1)[0]
    algorithm = legato.algorithm("grpo", {**changes, f"{part}.beta": 1.0, "aggregate": "sequence-sum"})
    signals = {
        "logprobs": logprobs,
        "old_logprobs": logprobs.detach(),
        "ref_logprobs": Z_REF.log_softmax(0).unsqueeze(1),
        "advantages": torch.zeros(3, dtype=torch.float64),
        "mask": torch.ones(3, 1, dtype=torch.bool),
    }
    weights = logprobs.detach().exp()
    rows = [legato.loss(algorithm, **{k: v[i : i + 1] for k, v in signals.items()}) for i in range(3)]
    expected = sum(weight * row.loss for weight, row in zip(weights.flatten(), rows, strict=True))
    assert expected.item() == pytest.approx(value, abs=1e-11)
    expected.backward()
    assert z.grad.tolist() == pytest.approx(gradient, abs=1e-11)


def test_the_masked_example_with_an_empty_response() -> None:
    shift = torch.tensor([[0.1, -0.3, 0.2], [0, 0, 0], [0.05, 9.0, -0.02]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    old = torch.full((3, 3), -1.0, dtype=torch.float64)
    value = legato.algorithm("gspo", {"objective.trust.clip.low": 0.2, "objective.trust.clip.high": 0.2})
    advantages = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    outcome = legato.loss(value, logprobs=old + shift, old_logprobs=old, advantages=advantages, mask=mask)
    assert outcome.loss.item() == pytest.approx(0.055137823290, abs=1e-12)
    assert outcome.trace.log_ratio.exp().flatten().tolist() == pytest.approx([0.904837418036, 1, 1.015113064616])
    assert outcome.metrics["length/empty"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("token-mean", 13 / 7), ("group-token-mean", 7 / 3), ("sequence-mean", 2.0), ("sequence-sum", 13 / 3)],
)
def test_the_aggregations_of_the_two_group_example(aggregate: str, expected: float) -> None:
    """Token losses 1 1 | 2 2 2 2 in one group and 3 in the other: the negative advantages of an on-policy batch."""
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    advantages = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    value = legato.algorithm("grpo", {"aggregate": aggregate})
    outcome = legato.loss(
        value, logprobs=zeros, old_logprobs=zeros, advantages=advantages, mask=mask, group=torch.tensor([4, 4, 9])
    )
    assert outcome.loss.item() == pytest.approx(expected)


def test_one_band_for_all_lengths_clips_the_short_ones() -> None:
    """Log-normal lengths (median 1,000, sigma 1), token deviation 0.015, and the band that clips 15 % overall."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(4000, generator=generator, dtype=torch.float64) + math.log(1000)).exp().clamp(21, 32000)
    deviations = (0.015 / lengths.sqrt()).tolist()

    def clipped(width: float) -> list[float]:
        return [predicted_clip_fraction(width, width, deviation) for deviation in deviations]

    low, high = 1e-5, 1e-2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(clipped(middle)) / len(deviations) > 0.15 else (low, middle)
    by_length = torch.tensor(clipped(low), dtype=torch.float64)[lengths.argsort()].reshape(5, -1).mean(1)
    assert by_length.tolist() == pytest.approx([0.2909, 0.2046, 0.1488, 0.0819, 0.0232], abs=0.012)
    fair = [calibrated_width(0.15, 0.015, 1.0, length) for length in lengths.tolist()]
    even = [predicted_clip_fraction(w, w, d) for w, d in zip(fair, deviations, strict=True)]
    assert [min(even), max(even)] == pytest.approx([0.15, 0.15], abs=2e-3)


@pytest.mark.parametrize("drift", [0.0, math.sqrt(2.6 / 512)])
def test_simulated_slopes_are_the_predicted_ones(drift: float) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([16, 64, 256, 1024])
    variances = []
    for length in lengths.tolist():
        tokens = torch.randn(2000, length, generator=generator, dtype=torch.float64)
        shared = drift * torch.randn(2000, generator=generator, dtype=torch.float64)
        variances.append(float((tokens.mean(1) + shared).var()))
    expected = log_slope(lengths, predicted_variance(1.0, drift, 1.0, lengths))
    assert log_slope(lengths, torch.tensor(variances)) == pytest.approx(expected, abs=0.04)
