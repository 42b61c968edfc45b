"""Filters and the overlong punishment."""

import pytest
import torch

from legato.advantages.filters import Overlong, Samples, Staleness, ZeroVariance
from legato.errors import InputError
from legato.rewards.overlong import OverlongPunishment

GROUP = torch.tensor([0, 0, 0, 1, 1, 1])


def test_groups_without_variance_are_dropped() -> None:
    accuracy = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    assert ZeroVariance().keep(Samples(accuracy=accuracy, group=GROUP)).tolist() == [True] * 3 + [False] * 3


def test_rounding_is_not_variance() -> None:
    accuracy = torch.tensor([0.1, 0.1, 0.1, 1e6, 1e6, 1e6]) * (1 + 1e-8 * torch.randn(6, dtype=torch.float64))
    assert not ZeroVariance().keep(Samples(accuracy=accuracy, group=GROUP)).any()


def test_truncated_and_stale_responses_are_dropped() -> None:
    accuracy = torch.zeros(6)
    cut = torch.tensor([0, 1, 0, 0, 1, 0]).bool()
    lag = torch.tensor([0, 1, 2, 3, 4, 5])
    assert torch.equal(Overlong().keep(Samples(accuracy=accuracy, group=GROUP, truncated=cut)), ~cut)
    assert (
        Staleness(most=2).keep(Samples(accuracy=accuracy, group=GROUP, version_lag=lag)).tolist() == [True] * 3 + [False] * 3
    )


def test_a_filter_says_what_it_needs() -> None:
    samples = Samples(accuracy=torch.zeros(6), group=GROUP)
    with pytest.raises(ValueError, match="pass truncated"):
        Overlong().keep(samples)
    with pytest.raises(ValueError, match="pass version_lag"):
        Staleness().keep(samples)


@pytest.mark.parametrize(
    ("most", "cache", "expected"),
    [
        (100, 20, {79: 0, 80: 0, 81: -0.05, 90: -0.5, 100: -1, 101: -1}),
        (20480, 4096, {16384: 0, 16385: -0.000244140625, 18432: -0.5, 20480: -1, 20481: -1}),
    ],
)
def test_the_overlong_punishment_has_the_printed_values(most: int, cache: int, expected: dict[int, float]) -> None:
    punishment = OverlongPunishment(cache_share=cache / most).punishment(torch.tensor(list(expected)), most)
    assert punishment.tolist() == pytest.approx(list(expected.values()))


def test_a_cache_longer_than_the_response_is_refused() -> None:
    with pytest.raises(InputError, match="cache_share"):
        OverlongPunishment(cache_share=1.5)
