"""The adaptive clip inside a step: which updates move the band, and that passes and packs do not matter."""

import math

import pytest
import torch

import legato
from legato.core.rollout import Score
from legato.training.probe import band, probe
from legato.training.report import StepReport, read_state
from tests.policy.exact import family, policy_of
from tests.training.test_probe import tables_with_noise
from tests.training.test_trainer import Trainer, max_difference, run, trainer, weights

START = math.log1p(4e-4)


def bound(of: Trainer, key: str = "log_high") -> float:
    return read_state(of.state)["auto-clip"][key]


def test_the_band_moves_with_every_update_but_the_first_of_a_step() -> None:
    this = trainer("gspo-auto", updates_per_step=4)
    reports = run(this, 2)
    assert bound(this, "updates") == sum(count_teaching_updates(report) for report in reports) > 3
    assert bound(this) != START
    metrics = reports[-1].metrics
    assert metrics["state/auto-clip.log_high"] == bound(this)
    assert all(report.metrics["clip/beyond_positive@0"] == 0 for report in reports)
    assert bound(this) == pytest.approx(bound_by_hand(reports), rel=0.2), "the course is what the counts of the updates say"


def count_teaching_updates(report: StepReport) -> int:
    """Updates after the first in which some response had an advantage."""
    return sum(f"clip/beyond_positive@{k}" in report.metrics for k in (1, 2, 3))


def bound_by_hand(reports: list[StepReport]) -> float:
    """The bound after the updates of these reports, from the clipped shares by sign; exact to a few per cent."""
    bound = START
    for report in reports:
        for k in (1, 2, 3):
            shares = [report.metrics.get(f"clip/beyond_{sign}@{k}", math.nan) for sign in ("positive", "negative")]
            known = [share for share in shares if not math.isnan(share)]
            if known:
                bound *= math.exp(0.1 * (sum(known) / len(known) - 0.15))
    return bound


def test_with_one_update_per_step_the_adaptive_clip_does_not_move() -> None:
    this = trainer("gspo-auto", updates_per_step=1)
    run(this, 2)
    assert bound(this) == START and bound(this, "updates") == 0


def test_a_second_pass_over_the_rollouts_teaches_from_its_first_update_on() -> None:
    this = trainer("gspo-auto", updates_per_step=2, epochs_per_step=2)
    run(this, 1)
    assert bound(this, "updates") == 3


def test_the_band_does_not_depend_on_passes_and_packs() -> None:
    changes = {"objective.trust.auto-clip.follows": "perplexity", "objective.trust.auto-clip.scale": "sqrt-length"}
    runs = {}
    for name, settings in {
        "one": {"update_passes": "one"},
        "two": {"update_passes": "two"},
        "small packs": {"update_passes": "two", "tokens_per_pack": 20},
        "one, all rows": {"update_passes": "one", "skip_silent_rows": False},
    }.items():
        runs[name] = trainer("gspo-auto", changes=changes, **settings)
        run(runs[name], 2)
    expected = runs.pop("one")
    assert bound(expected, "updates") > 2
    for name, other in runs.items():
        assert bound(other, "updates") == bound(expected, "updates"), name
        assert bound(other) == pytest.approx(bound(expected), rel=1e-9), name
        assert max_difference(weights(other), weights(expected)) < 1e-8, name


@pytest.mark.parametrize("follows", ["counts", "perplexity"])
def test_responses_that_a_filter_drops_do_not_move_the_band(follows: str) -> None:
    """Truncated responses here. Leaving them out beforehand must equal weighing them with 0."""
    changes = {"filters": ["overlong"], "objective.trust.auto-clip.follows": follows}
    bounds = []
    for skipped in (True, False):
        this = trainer("gspo-auto", changes=changes, skip_silent_rows=skipped)
        run(this, 3)
        bounds.append(this)
    assert bound(bounds[0], "updates") == bound(bounds[1], "updates") > 0
    assert bound(bounds[0]) == pytest.approx(bound(bounds[1]), rel=1e-9)


def test_switching_to_an_adaptive_band_starts_from_its_initial_state() -> None:
    """Switching back drops the state. A resumed run may change the algorithm in this way."""
    fixed, this = trainer("gspo"), trainer("gspo-auto")
    run(fixed, 1)
    this.load_state_dict(fixed.state_dict())
    assert bound(this) == START
    run(this, 1)
    fixed.load_state_dict(this.state_dict())
    assert fixed.state == {}


def test_updates_with_equal_scores_do_not_move_the_band() -> None:
    this = trainer("gspo-auto", judge=lambda rollouts: [Score(reward=1.0, accuracy=1.0) for _ in rollouts])
    run(this, 1)
    assert bound(this) == START


@pytest.mark.parametrize("anchor", ["sampler", "recompute"])
def test_the_probe_sets_the_noise_floor_and_it_counts_the_engine_where_that_is_the_anchor(anchor: str) -> None:
    policy, value = policy_of(family("qwen3")), legato.algorithm("gspo-auto")
    floor = probe(policy, value, tables_with_noise(policy, 5e-4), 40)
    assert floor.noise(True) == pytest.approx(5e-4, rel=1e-6) and floor.noise(False) < 1e-12
    this = trainer("gspo-auto", anchor=anchor)
    run(this, 1)
    # One model in float64; the engine's words are kept in float32.
    assert (1e-9 < bound(this, "noise") < 1e-6) if anchor == "sampler" else bound(this, "noise") < 1e-9


def test_the_noise_is_that_of_the_bounded_ratio() -> None:
    policy = policy_of(family("qwen3"))
    tables = tables_with_noise(policy, 5e-4)
    scaled = {"objective.trust.auto-clip.scale": "sqrt-length", "objective.trust.auto-clip.reference_length": 4.0}
    lengths = tables.texts.mask.sum(1).double()
    lengths = lengths[lengths > 0]
    noise = probe(policy, legato.algorithm("gspo-auto", scaled), tables, 40).noise(True)
    assert noise == pytest.approx(5e-4 * float((lengths / 4).mean().sqrt()), rel=1e-6)


def test_the_band_the_probe_compares_with_is_the_one_of_the_state() -> None:
    value = legato.algorithm("gspo-auto")
    assert band(value) == pytest.approx(3e-4, rel=1e-3)
    wide = {"auto-clip": {**value.initial()["auto-clip"], "log_low": 0.03, "log_high": torch.tensor(0.04)}}
    assert band(value, wide) == pytest.approx(0.03)
    policy = policy_of(family("qwen3"))
    assert not probe(policy, value, tables_with_noise(policy, 5e-4), 40).sampler_is_safe
    assert probe(policy, value, tables_with_noise(policy, 5e-4), 40, wide).sampler_is_safe
