"""The rules as they are, on members of which a sign means something else than on most."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import legato
from legato.config.load import load
from legato.health.tighten import clip_bounds, tighten_clip
from legato.records.directory import RunDirectory
from legato.run.doctor import examine
from tests.proof.runs import light, run_small
from tests.run.test_health import early


@pytest.fixture(scope="module", autouse=True)
def without_reports() -> Iterator[None]:
    with light():
        yield


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "gepo", "algorithm.objective.trust.clip.low": 0.01, "algorithm.objective.trust.clip.high": 0.01},
        {"algorithm": "grpo", "algorithm.objective.trust": ["clip", "high-entropy"]},
        {"algorithm": "gspo", "training.epochs_per_step": 3},
    ],
    ids=["ratios beside those of siblings", "tokens left out by entropy", "several epochs"],
)
def test_ratios_outside_the_band_by_design_raise_no_anchor_alarm(options: dict[str, Any], tmp_path: Path) -> None:
    settings = {"training.steps": 3, "evaluation.every_steps": 0, "training.prompts_per_step": 8}
    ended = run_small(tmp_path, {**settings, **options}, reward=early)
    findings = RunDirectory.open(ended.directory).health.read()
    assert "anchor-off" not in [each["rule"] for each in findings]
    assert "anchor-off" not in [each.name for each in examine(ended.directory).found]


def test_only_bounds_on_the_ratio_are_tightened() -> None:
    value = legato.algorithm("grpo", {"objective.trust": ["clip", "clip-cov"]})
    assert {*clip_bounds(value)} == {"objective.trust.clip.low", "objective.trust.clip.high"}
    assert tighten_clip(value, 0.5).objective.trust[1] == value.objective.trust[1]


@pytest.mark.parametrize("name", ["sapo", "cispo", "rloo"])
def test_a_clip_factor_without_a_clip_is_refused(name: str) -> None:
    words = [f"algorithm={name}", "health.action=recover", "health.clip_factor=0.5"]
    with pytest.raises(ValueError, match=rf"health\.clip_factor.*{name}|{name}.*health\.clip_factor"):
        load([], words)
