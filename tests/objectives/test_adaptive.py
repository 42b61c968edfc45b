"""The adaptive clip: the numbers of its specification, and its rules one by one."""

import json
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import legato
from legato.algorithms.cautions import cautions
from legato.core.sums import Sums
from tests.proof.adaptive import QUOTIENT, as_floats, auto_clip, sums_of
from tests.proof.batches import batches, examples, keep_fields
from tests.proof.bridge import assert_agrees, evaluate
from tests.reference import aggregation, controller, objectives, ratios

SIGNS = [1, -1, 1, -1, 1, 1, -1, -1, 0, 1]
LOG_S = [value * 1e-4 for value in (5, 2, -3, -6, 1, 9, -1, 4, 7, 2)]
LENGTHS = [100, 400, 100, 900, 1600, 400, 100, 100, 50, 2500]


def symmetric(bound: float, **fields: Any) -> legato.Algorithm:
    """q = 1: the band is b on both sides of log s."""
    return auto_clip(low=-math.expm1(-bound), high=math.expm1(bound), **fields)


def outcome_of(value: legato.Algorithm, log_s: Any, signs: Any, lengths: Any = None, state: Any = None) -> Any:
    """The outcome of an update of responses with these log s. Every token of a response has that log-ratio."""
    log_s, signs = (torch.as_tensor(numbers, dtype=torch.float64) for numbers in (log_s, signs))
    lengths = torch.ones(len(log_s)) if lengths is None else torch.as_tensor(lengths)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    old = torch.full(mask.shape, -1.0, dtype=torch.float64)
    state = value.initial() if state is None else state
    arguments = {"old_logprobs": old, "advantages": signs, "mask": mask, "state": state}
    return legato.loss(value, logprobs=old + log_s.unsqueeze(1), **arguments)


def test_sums_of_equals_the_sums_of_the_loss() -> None:
    generator, value = numpy.random.default_rng(5), auto_clip(scale="sqrt-length", reference_length=300.0)
    log_s, signs = generator.normal(1e-4, 6e-4, 10), generator.choice([-1, 0, 1], 10)
    measured = outcome_of(value, log_s, signs, LENGTHS).metrics
    for key, number in sums_of(value.initial(), log_s, signs, numpy.sqrt(300 / numpy.array(LENGTHS))).report().items():
        assert measured[key] == pytest.approx(number, rel=1e-9)


@pytest.mark.parametrize(("target", "expected"), [(0.2, 5.4e-4), (0.15, 5.8e-4), (1 / 3, 3.0e-4)])
def test_the_lagged_quantile_has_the_numbers_of_the_sheet(target: float, expected: float) -> None:
    x = controller.signed_log_ratios(SIGNS, LOG_S)
    assert sorted(x) == pytest.approx([value * 1e-4 for value in (-4, -3, -2, 1, 1, 2, 5, 6, 9)])
    assert controller.quantile(x, 1 - target) == pytest.approx(expected, rel=1e-12)


def test_a_bound_on_log_s_is_these_distances_from_one() -> None:
    assert math.expm1(5.4e-4) == pytest.approx(5.401458262e-4, rel=1e-9)
    value = symmetric(5.4e-4)
    metrics = outcome_of(value, LOG_S, SIGNS).metrics
    assert (metrics["clip/band_high"], metrics["clip/band_low"]) == pytest.approx((5.401458262e-4, 5.398542262e-4), rel=1e-9)
    assert metrics["clip/beyond_positive"] == pytest.approx(1 / 5)
    assert metrics["clip/beyond_negative"] == pytest.approx(1 / 4)


@pytest.mark.parametrize("target", [0.2, 0.15, 1 / 3])
def test_on_the_vector_the_band_comes_to_rest_where_the_target_is_met(target: float) -> None:
    """Between the two responses of which the first would make the share too small and the second too large."""
    x = sorted(controller.signed_log_ratios(SIGNS, LOG_S))
    value = symmetric(1e-3, target=target, rate=0.02)
    state = value.initial()
    for _ in range(1000):
        state = value.advance(state, sums_of(state, LOG_S, SIGNS), first=False)
    bound = as_floats(state)["log_high"]
    above = sum(value > bound * 1.05 for value in x) / len(x)
    below = sum(value > bound / 1.05 for value in x) / len(x)
    assert above <= target + 1e-9 and target - 1e-9 <= below


def test_the_length_aware_band_has_the_numbers_of_the_sheet() -> None:
    z = controller.signed_log_ratios(SIGNS, LOG_S, lengths=LENGTHS)
    constant = controller.quantile(z, 0.8)
    assert constant == pytest.approx(0.0132, rel=1e-12)
    value = symmetric(constant, scale="sqrt-length", reference_length=1.0)
    low, high = outcome_of(value, LOG_S, SIGNS, LENGTHS).trace.band
    by_length = {length: float(bound) for length, bound in zip(LENGTHS, high.squeeze(1), strict=True)}
    assert by_length[100] == pytest.approx(1.32e-3, rel=1e-12) and by_length[2500] == pytest.approx(2.64e-4, rel=1e-12)
    torch.testing.assert_close(low, -high)


@pytest.mark.parametrize("fields", [{}, {"follows": "perplexity"}, {"scale": "sqrt-length", "reference_length": 300.0}])
def test_one_advance_equals_the_formula_in_plain_python(fields: dict[str, Any]) -> None:
    value, generator = auto_clip(**fields), numpy.random.default_rng(3)
    state, bound = value.initial(), math.log1p(4e-4)
    lengths = LENGTHS if "scale" in fields else None
    for _ in range(20):
        log_s, signs = generator.normal(1e-4, 6e-4, 10), generator.choice([-1, 0, 1], 10)
        x = controller.signed_log_ratios(signs, log_s, QUOTIENT, lengths, 300.0)
        state = value.advance(state, outcome_of(value, log_s, signs, lengths, state).sums, first=False)
        follows = fields.get("follows", "counts")
        if follows == "counts":
            bound = controller.by_counts(bound, x, 0.15, 0.1)
        else:
            bound = controller.by_moments(bound, x, 0.15, 0.1, 1e-6 * QUOTIENT)
        assert as_floats(state)["log_high"] == pytest.approx(bound, rel=1e-12)
        assert as_floats(state)["log_low"] == pytest.approx(bound / QUOTIENT, rel=1e-12)


def test_auto_clip_starts_as_gspo_to_the_bit_and_reads_its_band_from_the_state() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(32, 6, generator=generator)
    arguments = {
        "logprobs": old + 1e-3 * torch.randn(32, 6, generator=generator),
        "old_logprobs": old,
        "advantages": torch.randn(32, generator=generator),
        "mask": torch.rand(32, 6, generator=generator) < 0.8,
    }
    value = legato.algorithm("gspo-auto")
    first = legato.loss(value, **arguments, state=value.initial())
    assert torch.equal(first.coefficients, legato.loss("gspo", **arguments).coefficients)
    wide = {"auto-clip": {**value.initial()["auto-clip"], "log_low": 1.0, "log_high": 1.0}}
    assert legato.loss(value, **arguments, state=wide).metrics["clip/sequences"] == 0
    assert first.metrics["clip/sequences"] > 0.1


@examples(10)
@given(batch=batches(), low=st.floats(1e-5, 0.04), high=st.floats(1e-5, 0.04))
def test_a_moved_band_is_a_clip_at_that_band(batch: Any, low: float, high: float) -> None:
    batch = keep_fields(batch)
    value = legato.algorithm("gspo-auto")
    state = {"auto-clip": {"log_low": -math.log1p(-low), "log_high": math.log1p(high), "noise": 0.0, "updates": 7.0}}
    log_ratio = ratios.token_log_ratios(batch, limit=None)
    reference = objectives.clipped_segments(batch, aggregation.sequence_mean(batch), log_ratio, low, high)
    assert_agrees(evaluate(value, batch, state=state), reference)


def test_the_first_update_does_not_move_the_band_and_must_be_marked() -> None:
    value = legato.algorithm("gspo-auto")
    sums = outcome_of(value, [0.1] * 4, [1] * 4).sums
    assert as_floats(value.advance(value.initial(), sums, first=True)) == as_floats(value.initial())
    assert as_floats(value.advance(value.initial(), sums, first=False))["log_high"] > math.log1p(4e-4)
    with pytest.raises(ValueError, match="first=True"):
        value.advance(value.initial(), sums)


def test_sums_of_something_else_are_refused() -> None:
    value = legato.algorithm("gspo-auto")
    with pytest.raises(ValueError, match="clip/beyond_positive"):
        value.advance(value.initial(), legato.loss("gspo", **_plain()).sums, first=False)
    with pytest.raises(ValueError, match=r"pass state=algorithm.initial\(\)"):
        legato.loss(value, **_plain())
    with pytest.raises(ValueError, match="expected a finite number >= 0, got -1"):
        value.calibrated(value.initial(), noise=-1)


def _plain() -> dict[str, Tensor]:
    zeros = torch.zeros(2, 3)
    return {"logprobs": zeros, "old_logprobs": zeros, "advantages": torch.tensor([1.0, -1.0]), "mask": torch.ones(2, 3)}


def test_updates_without_advantages_or_with_infinite_ratios_leave_the_band() -> None:
    for fields in ({}, {"follows": "perplexity"}):
        value = auto_clip(**fields)
        for log_s, signs in (([0.1, 0.2], [0, 0]), ([math.inf, -0.1], [1, 1])):
            moved = as_floats(value.advance(value.initial(), outcome_of(value, log_s, signs).sums, first=False))
            if fields or not any(signs):
                assert (moved["log_low"], moved["log_high"]) == pytest.approx((-math.log1p(-3e-4), math.log1p(4e-4)))
            assert all(math.isfinite(number) for number in moved.values())


def test_the_noise_floor_lifts_the_band_at_once_and_keeps_it_up() -> None:
    value = legato.algorithm("gspo-auto")
    state = value.calibrated(value.initial(), noise=1e-3)
    assert as_floats(state)["log_low"] == pytest.approx(3e-3) and as_floats(state)["log_high"] == pytest.approx(
        3e-3 * QUOTIENT
    )
    for _ in range(50):
        state = value.advance(state, sums_of(state, [0.0] * 4, [1, -1] * 2), first=False)
    assert as_floats(state)["log_low"] == pytest.approx(3e-3)
    quieter = value.calibrated(state, noise=1e-5)
    assert as_floats(quieter)["log_low"] == pytest.approx(3e-3), "a floor that falls does not pull the band down"


def test_the_band_stops_at_its_ceiling_and_at_its_floor() -> None:
    for fields in ({}, {"follows": "perplexity"}, {"sides": "apart"}):
        value = auto_clip(**fields)
        up = down = value.initial()
        for _ in range(100):
            up = value.advance(up, sums_of(up, [9.0, -9.0] * 2, [1, -1] * 2), first=False)
            down = value.advance(down, sums_of(down, [-9.0, 9.0] * 2, [1, -1] * 2), first=False)
        assert max(as_floats(up)["log_high"], as_floats(up)["log_low"]) == pytest.approx(0.05)
        lowest = 3e-4 * math.exp(-100 * 0.1 * 0.15) if fields.get("follows") != "perplexity" else 1e-6
        assert as_floats(down)["log_low"] == pytest.approx(lowest, rel=1e-3)


def test_together_the_ratio_of_the_sides_stays_and_apart_each_follows_its_own() -> None:
    log_s, signs = [2e-3, 2e-3, 1e-5, 1e-5], [1, 1, -1, -1]
    together, apart = legato.algorithm("gspo-auto"), auto_clip(sides="apart")
    moved = as_floats(together.advance(together.initial(), outcome_of(together, log_s, signs).sums, first=False))
    assert moved["log_high"] / moved["log_low"] == pytest.approx(QUOTIENT)
    assert moved["log_high"] == pytest.approx(math.log1p(4e-4) * math.exp(0.1 * (0.5 - 0.15)))
    moved = as_floats(apart.advance(apart.initial(), outcome_of(apart, log_s, signs).sums, first=False))
    assert moved["log_high"] == pytest.approx(math.log1p(4e-4) * math.exp(0.1 * (1 - 0.15)))
    assert moved["log_low"] == pytest.approx(-math.log1p(-3e-4) * math.exp(0.1 * (0 - 0.15)))


def test_the_band_can_be_frozen_after_some_updates() -> None:
    value = auto_clip(freeze_after=5)
    state, track = value.initial(), []
    for _ in range(8):
        state = value.advance(state, outcome_of(value, [0.1] * 4, [1] * 4, state=state).sums, first=False)
        track.append(as_floats(state)["log_high"])
    assert track[:5] == sorted(set(track[:5])) and len(set(track[4:])) == 1


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo-token", "turn-gspo", "luspo", "seq-product"])
def test_auto_clip_works_on_other_algorithms_and_counts_each_ratio_once(name: str) -> None:
    """Two responses of 4 and 2 tokens; the turn ratio has three segments, the token ratio six, the others two."""
    drift = torch.tensor([[0.3, 0.3, -0.1, -0.1], [0.2, 0.2, 0.0, 0.0]], dtype=torch.float64)
    old = torch.full((2, 4), -1.0, dtype=torch.float64)
    arguments = {
        "logprobs": old + drift,
        "old_logprobs": old,
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
        "mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "group": torch.tensor([0, 0]),
        "turn": torch.tensor([[0, 0, 1, 1], [0, 0, -1, -1]]),
    }
    value = auto_clip(name, low=0.01, high=0.01)
    sums = legato.loss(value, **arguments, state=value.initial()).sums
    counts = {side: float(sums[f"clip/beyond_{side}"].count) for side in ("positive", "negative")}
    expected = {"grpo": (4, 2), "dapo": (4, 2), "turn-gspo": (2, 1)}.get(name, (1, 1))
    assert tuple(counts.values()) == pytest.approx(expected)
    share = {"grpo": 0.5, "dapo": 0.5, "turn-gspo": 0.5}.get(name, 1.0)
    assert sums.report()["clip/beyond_positive"] == pytest.approx(share)
    assert sums.report()["clip/beyond_negative"] == 0
    assert as_floats(value.advance(value.initial(), sums, first=False))["updates"] == 1


def test_a_large_target_on_token_ratios_gets_a_caution() -> None:
    assert any("clips 15% of the tokens" in sentence for sentence in cautions(auto_clip("grpo")))
    for value in (auto_clip("grpo", target=1e-3), auto_clip()):
        assert not any("of the tokens" in sentence for sentence in cautions(value))


def test_a_fixed_band_beside_an_adaptive_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two bands on one ratio: set .* objective\.trust\.auto-clip\.low"):
        legato.algorithm("gspo", {"objective.trust.auto-clip.target": 0.1})
    assert legato.algorithm("gmpo", {"objective.trust.auto-clip.target": 0.1}).initial()
    for removal in ({"objective.trust.clip": None}, {"objective.trust": []}):
        changed = legato.algorithm("luspo", {**removal, "objective.trust.auto-clip.high": 2.5e-3})
        assert [part.name for part in changed.objective.trust] == ["auto-clip"]
    with pytest.raises(ValueError, match="not between floor"):
        auto_clip(high=0.2)


def test_micro_batches_move_the_band_like_the_whole_update() -> None:
    value, generator = legato.algorithm("gspo-auto"), numpy.random.default_rng(1)
    log_s, signs = generator.normal(0, 1e-3, 40), generator.choice([-1.0, 1.0], 40)
    whole = outcome_of(value, log_s, signs).sums
    parts = sum((outcome_of(value, log_s[a:b], signs[a:b]).sums for a, b in ((0, 3), (3, 30), (30, 40))), start=Sums())
    assert as_floats(value.advance(value.initial(), parts, first=False)) == as_floats(
        value.advance(value.initial(), whole, first=False)
    )


def test_a_state_that_went_through_json_goes_on_to_the_bit() -> None:
    value, generator = auto_clip(follows="perplexity"), numpy.random.default_rng(2)
    straight = value.initial()
    stored: Any = value.initial()
    for _ in range(30):
        log_s, signs = generator.normal(0, 1e-3, 16), generator.choice([-1.0, 1.0], 16)
        straight = value.advance(straight, outcome_of(value, log_s, signs, state=straight).sums, first=False)
        stored = value.advance(stored, outcome_of(value, log_s, signs, state=stored).sums, first=False)
        stored = json.loads(json.dumps({"auto-clip": as_floats(stored)}))
    assert as_floats(straight) == as_floats(stored)


class HostReads(TorchDispatchMode):
    """Counts how often a tensor is read as a number: on a GPU each of them waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("follows", ["counts", "perplexity"])
def test_advancing_the_state_does_not_read_from_the_device(follows: str) -> None:
    value, plain = auto_clip(follows=follows, freeze_after=3), legato.algorithm("gspo")
    generator = numpy.random.default_rng(1)
    log_s, signs = generator.normal(0, 1e-3, 40), generator.choice([-1.0, 1.0], 40)
    state = value.advance(value.initial(), outcome_of(value, log_s, signs).sums, first=False)
    sums = outcome_of(value, log_s, signs, state=state).sums
    with HostReads() as reads:
        value.advance(state, sums, first=False)
    assert reads.count == 0
    with HostReads() as reads:
        outcome_of(value, log_s, signs, state=state)
    with HostReads() as others:
        outcome_of(plain, log_s, signs, state={})
    assert reads.count <= others.count, "the loss itself reads no more than gspo's"
