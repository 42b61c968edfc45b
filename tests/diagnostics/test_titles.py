"""Titles of metrics in words."""

import pytest

from legato.diagnostics.metrics.definitions import METRICS
from legato.diagnostics.metrics.run import RUN_METRICS
from legato.diagnostics.metrics.titles import TITLES, metric_title


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("reward/mean", "Reward"),
        ("length/tokens_p50", "Length of responses, median"),
        ("length/tokens_p95", "Length of responses, percentile 95"),
        ("clip/sequences_length_bin0", "Clipped responses by length, below 128 tokens"),
        ("router/flip_layer0", "Experts that changed, layer 1"),
        ("eval/accuracy_greedy_low", "Held-out accuracy, greedy, lower end of the 95 % interval"),
        ("loss/entropy_bonus", "Penalty entropy bonus"),
        ("reward/format", "Reward component format"),
        ("mine/own_number", "Mine own number"),
        ("plain", "Plain"),
        ("", ""),
    ],
)
def test_a_key_has_a_title_in_words(key: str, title: str) -> None:
    assert metric_title(key) == title


def test_every_title_is_of_a_metric_and_no_title_is_a_key() -> None:
    keys = {metric.key for metric in (*METRICS, *RUN_METRICS)} | {"loss"}  # of the warm-up
    assert set(TITLES) <= keys
    assert not [title for title in TITLES.values() if "/" in title or "_" in title]
