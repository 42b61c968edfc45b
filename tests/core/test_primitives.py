"""The primitives of core against plain torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from legato.core.bounded import bounded, choose
from legato.core.mask import Mask
from legato.core.scan import reverse_recurrence
from legato.core.segments import Segments, ordered_sum
from legato.core.sums import (
    Deviation,
    EffectiveSize,
    Histogram,
    Maximum,
    Mean,
    Minimum,
    Sums,
    Total,
    _fetch_at_once,
    tensors_of,
)


def test_shapes_are_checked_while_testing() -> None:
    with pytest.raises(TypeCheckError):
        Mask(torch.ones(3, dtype=torch.bool), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection_equals_where_for_every_bit_pattern(dtype: torch.dtype) -> None:
    values = torch.tensor([[math.nan, math.inf, -math.inf, -0.0, 1e-45, 3.5, -2.0]], dtype=dtype, requires_grad=True)
    for pattern in (0b1010101, 0b0101010, 0b1111111, 0):
        tokens = torch.tensor([[bool(pattern >> i & 1) for i in range(7)]])
        selected = Mask(tokens, dtype).select(values)
        expected = torch.where(tokens, values, 0.0)
        torch.testing.assert_close(selected, expected, rtol=0, atol=0, equal_nan=True)
        upstream = torch.full_like(values, 2.0)
        (gradient,) = torch.autograd.grad(selected, values, upstream)
        assert torch.equal(gradient, torch.where(tokens, upstream, 0.0))


def test_difference_and_in_place_selection_equal_selection() -> None:
    left, right = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    mask = Mask(torch.rand(3, 5) < 0.5, torch.float32)
    expected = torch.autograd.grad(mask.select(left - right).square().sum(), (left, right))
    gradients = torch.autograd.grad(mask.difference(left, right).square().sum(), (left, right))
    torch.testing.assert_close(gradients, expected)
    assert torch.equal(mask.select_(left.detach().clone()), mask.select(left.detach()))


def test_bounds_equal_clamp_in_value_and_gradient() -> None:
    values = torch.linspace(-2, 2, 41, dtype=torch.float64).reshape(1, -1).requires_grad_()
    for lower, upper in ((-0.5, 0.7), (None, 0.7), (-0.5, None), (torch.tensor([[-0.5]]), torch.tensor([[0.7]]))):
        result = bounded(values, lower, upper)
        expected = values.clamp(
            None if lower is None else torch.as_tensor(lower, dtype=torch.float64).reshape(1, 1),
            None if upper is None else torch.as_tensor(upper, dtype=torch.float64).reshape(1, 1),
        )
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x.sum(), values, retain_graph=True)[0] for x in (result, expected)))


def test_choosing_between_plain_numbers_does_not_round_them() -> None:
    assert choose(torch.tensor([[True, False]]), 1.05, 0.95).tolist() == [[1.05, 0.95]]


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_the_recurrence_equals_its_loop(width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs, decay = (torch.rand(2, width, generator=generator, dtype=torch.float64) for _ in range(2))
    expected, carried = torch.zeros_like(inputs), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(width)):
        carried = inputs[:, t] + decay[:, t] * carried
        expected[:, t] = carried
    torch.testing.assert_close(reverse_recurrence(inputs, decay), expected)


def test_token_turn_and_sequence_are_means_over_segments() -> None:
    tokens = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()
    turn = torch.tensor([[0, 0, -1, 1, 1], [0, 1, 1, -1, -1]])
    values = torch.tensor([[1.0, 3.0, math.nan, 5.0, 9.0], [2.0, 4.0, 8.0, math.nan, math.nan]])
    mask = Mask(tokens, torch.float32)
    values = mask.select(values)
    token, turns, sequence = (Segments(level=level, mask=mask, turn=turn) for level in ("token", "turn", "sequence"))
    assert token.mean(values).tolist() == [[1, 3, 0, 5, 9], [2, 4, 8, 0, 0]]
    assert turns.mean(values).tolist() == [[2, 2, 0, 7, 7], [2, 6, 6, 0, 0]]
    assert sequence.mean(values).flatten().tolist() == pytest.approx([4.5, 14 / 3])
    joined = Segments(level="sequence", mask=mask, rollout=torch.tensor([0, 0]))
    assert joined.mean(values).flatten().tolist() == pytest.approx([32 / 7, 32 / 7])


def test_ordered_sums_repeat_to_the_bit() -> None:
    values, ids = torch.rand(10_000), torch.randint(0, 7, (10_000,))
    first = ordered_sum(values, ids, 7)
    assert all(torch.equal(first, ordered_sum(values, ids, 7)) for _ in range(5))


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60), st.floats(0, 1))
def test_histogram_quantiles_are_within_a_bin_of_the_exact_ones(values: list[float], share: float) -> None:
    histogram = Histogram.from_values(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))
    ordered = sorted(values)
    low, high = ordered[math.floor(share * (len(values) - 1))], ordered[math.ceil(share * (len(values) - 1))]
    (quantile,) = histogram.quantiles([share])
    assert low - abs(low) / 7 - 1e-30 <= quantile <= high + abs(high) / 7 + 1e-30


def test_bars_hold_the_filled_bins_and_one_bin_for_each_gap() -> None:
    values = torch.tensor([-0.01, -0.01, 1e-30, 0.02, 0.021, 3.0])
    bars = Histogram.from_values(values, torch.ones(6, dtype=torch.bool)).bars()
    assert bars["counts"] == [2, 0, 1, 0, 2, 0, 1]
    edges = bars["edges"]
    assert len(edges) == 8 and edges == sorted(set(edges)) and all(edge == float(f"{edge:.6g}") for edge in edges)
    filled = [(low, high) for low, high, count in zip(edges, edges[1:], bars["counts"], strict=False) if count]
    for low, high in filled:
        assert high - low <= max(abs(low), abs(high)) / 8 * 1.001
    assert all(any(low <= value <= high for low, high in filled) for value in values.tolist())


def test_pieces_merge_as_if_they_had_been_one() -> None:
    values = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 - 1
    ones = torch.ones((), dtype=torch.float64)

    def pieces(x: torch.Tensor) -> Sums:
        count = len(x) * ones
        return Sums(
            {
                "total": Total(x.sum()),
                "mean": Mean(x.sum(), count),
                "std": Deviation(x.sum(), x.square().sum(), count),
                "size": EffectiveSize(x.sum(), x.square().sum(), count),
                "max": Maximum(x.max()),
                "min": Minimum(x.min()),
                "histogram": Histogram.from_values(x, torch.ones_like(x, dtype=torch.bool)),
            }
        )

    merged = sum(pieces(x) for x in values.split([1, 40, 59])).report()
    exact = values.numpy()
    expected = {
        "total": exact.sum(),
        "mean": exact.mean(),
        "std": exact.std(),
        "size": exact.sum() ** 2 / (100 * (exact**2).sum()),
        "max": exact.max(),
        "min": exact.min(),
    }
    for key, value in expected.items():
        assert merged[key] == pytest.approx(value, rel=1e-12), key
    assert merged["histogram_p50"] == pytest.approx(np.median(exact), abs=0.1)


def test_a_metric_without_counts_is_nan() -> None:
    zero = torch.zeros((), dtype=torch.float64)
    report = Sums({"mean": Mean(zero, zero), "max": Maximum(torch.tensor(-torch.inf))}).report()
    assert all(math.isnan(value) for value in report.values())


def test_sums_of_several_updates_arrive_at_the_host_as_they_were() -> None:
    """Sums with every kind of tensor, copied at once; here on the CPU."""
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    many = [
        Sums(
            {
                "a": Mean(part.double().sum(), torch.tensor(len(part))),
                "b": Maximum(part.max()),
                "c": Histogram.from_values(part, torch.ones_like(part, dtype=torch.bool)),
            }
        )
        for part in values.split([1, 40, 59])
    ]
    tensors = [tensor for sums in many for piece in sums.values() for tensor in tensors_of(piece)]
    assert len({tensor.dtype for tensor in tensors}) > 1
    for before, after in zip(many, _fetch_at_once(many, tensors), strict=True):
        assert before.report() == after.report() and list(before) == list(after)
