"""On streams of drift of any shape, the adaptive clip converges to the lagged quantile."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

import legato
from tests.proof.adaptive import QUOTIENT, as_floats, auto_clip, sums_of
from tests.reference import controller

Stream = Callable[[numpy.random.Generator, int, int], numpy.ndarray]
"""[rows, length]: token log-ratios of one update, before their size."""


def _autoregressive(phi: float) -> Stream:
    def stream(generator: numpy.random.Generator, rows: int, length: int) -> numpy.ndarray:
        noise = generator.normal(size=(rows, length)) * math.sqrt(1 - phi * phi)
        drift = numpy.empty_like(noise)
        drift[:, 0] = noise[:, 0] / math.sqrt(1 - phi * phi)
        for t in range(1, length):
            drift[:, t] = phi * drift[:, t - 1] + noise[:, t]
        return drift

    return stream


def _long_memory(hurst: float) -> Stream:
    def stream(generator: numpy.random.Generator, rows: int, length: int) -> numpy.ndarray:
        lags = numpy.arange(length)
        covariance = 0.5 * (
            numpy.abs(lags + 1) ** (2 * hurst) - 2 * numpy.abs(lags) ** (2 * hurst) + numpy.abs(lags - 1) ** (2 * hurst)
        )
        root = numpy.linalg.cholesky(covariance[numpy.abs(lags[:, None] - lags)])
        return generator.normal(size=(rows, length)) @ root.T

    return stream


STREAMS: dict[str, Stream] = {
    "independent": lambda generator, rows, length: generator.normal(size=(rows, length)),
    "autoregressive": _autoregressive(2.6 / 4.6),
    "equicorrelated": lambda g, rows, n: math.sqrt(0.04) * g.normal(size=(rows, 1)) + 0.98 * g.normal(size=(rows, n)),
    "blocks": lambda g, rows, n: g.normal(size=(rows, n)) + numpy.repeat(g.normal(size=(rows, n // 16)), 16, axis=1) / 2,
    "long memory": _long_memory(0.602666),
    "a drift of each response": lambda g, rows, n: g.normal(size=(rows, n)) + 0.2 * g.normal(size=(rows, 1)),
    "heavy tails": lambda g, rows, n: g.standard_t(3, size=(rows, n)),
    "hidden large shifts": lambda g, rows, n: g.normal(size=(rows, n)) - 20 * (g.random((rows, n)) < 1e-3),
    "moving with the advantage": lambda g, rows, n: g.normal(size=(rows, n)) + 0.1,
    "ragged": lambda g, rows, n: g.normal(size=(rows, n)) / numpy.sqrt(g.choice([1 / n, 1 / 4, 1.0], (rows, 1))),
}


def updates_of(shape: str, count: int, size: float = 0.02, rows: int = 96, length: int = 64) -> Iterator[Any]:
    generator = numpy.random.default_rng(sum(map(ord, shape)))
    for _ in range(count):
        tokens = size * STREAMS[shape](generator, rows, length)
        signs = generator.choice([-1.0, 1.0], rows)
        log_s = tokens.mean(1) * (signs if shape == "moving with the advantage" else 1.0)
        yield log_s, signs


@pytest.mark.parametrize("shape", STREAMS)
def test_counting_finds_the_lagged_quantile_whatever_the_shape_of_the_drift(shape: str) -> None:
    """From a band ten times too narrow: after 250 updates it is the quantile's to 8 %, and clips 15 % to one point."""
    value = legato.algorithm("gspo-auto")
    oracle = controller.LaggedQuantile(math.log1p(4e-4), target=0.15, rate=0.1, window=16, least=1e-6)
    state, count = value.initial(), 400
    bounds, others, shares = [], [], []
    for log_s, signs in updates_of(shape, count):
        x = controller.signed_log_ratios(signs, log_s, QUOTIENT)
        shares.append(controller.clipped_share(x, as_floats(state)["log_high"]))
        state = value.advance(state, sums_of(state, log_s, signs), first=False)
        oracle.advance(x)
        bounds.append(math.log(as_floats(state)["log_high"]))
        others.append(math.log(oracle.bound))
    late = slice(250, None)
    assert numpy.mean(bounds[late]) == pytest.approx(numpy.mean(others[late]), abs=0.08)
    assert numpy.mean(shares[late]) == pytest.approx(0.15, abs=0.01)
    assert numpy.std(bounds[late]) < 0.15


@pytest.mark.parametrize("shape", ["independent", "a drift of each response", "moving with the advantage", "heavy tails"])
def test_moments_find_the_quantile_of_a_drift_that_is_normal_and_get_there_sooner(shape: str) -> None:
    results = {}
    for follows in ("counts", "perplexity"):
        value = auto_clip(follows=follows)
        state, track, shares = value.initial(), [], []
        for log_s, signs in updates_of(shape, 150, size=0.2):
            shares.append(
                controller.clipped_share(controller.signed_log_ratios(signs, log_s, QUOTIENT), as_floats(state)["log_high"])
            )
            state = value.advance(state, sums_of(state, log_s, signs), first=False)
            track.append(as_floats(state)["log_high"])
        level = numpy.median(track[-50:])
        results[follows] = (next(i for i, bound in enumerate(track) if bound > level / 1.5), numpy.mean(shares[-50:]))
    assert results["perplexity"][0] < results["counts"][0] / 1.5
    assert results["perplexity"][1] == pytest.approx(0.15, abs=0.04)


def test_a_length_aware_band_clips_short_and_long_alike() -> None:
    """10.4: one band for all lengths clips short answers several times as often; c / sqrt(L) does not."""
    generator, lengths = numpy.random.default_rng(4), numpy.repeat([4, 16, 64], 40)
    rates = {}
    for scale in ("none", "sqrt-length"):
        value = auto_clip(scale=scale, reference_length=16.0)
        state, clipped = value.initial(), numpy.zeros(3)
        for number in range(500):
            log_s, signs = generator.normal(0, 0.02, 120) / numpy.sqrt(lengths), generator.choice([-1.0, 1.0], 120)
            widening = numpy.sqrt(16 / lengths) if scale == "sqrt-length" else numpy.ones(120)
            band = numpy.where(signs > 0, as_floats(state)["log_high"], as_floats(state)["log_low"]) * widening
            if number >= 250:
                clipped += (signs * log_s > band).reshape(3, 40).mean(1) / 250
            state = value.advance(state, sums_of(state, log_s, signs, widening), first=False)
        rates[scale] = clipped
    assert rates["none"][0] > 2 * rates["none"][1] > 4 * rates["none"][2]
    assert rates["sqrt-length"] == pytest.approx([0.15] * 3, abs=0.02)
