"""The cache of warm-ups: the same run with it, without it, and from it."""

from pathlib import Path
from typing import Any

import pytest

from legato.records.directory import RunDirectory
from tests.proof.runs import differences, run_small, trained

WARM: dict[str, Any] = {"policy.warm_up.steps": 3, "policy.warm_up.examples_per_step": 4, "training.steps": 2}

pytestmark = pytest.mark.usefixtures("lightly")


def warm_up_records(folder: Path) -> int:
    return sum(record["kind"] == "warm-up" for record in RunDirectory.open(folder).metrics())


def test_a_run_with_a_cached_warm_up_is_the_run_without_to_the_bit(tmp_path: Path) -> None:
    cache = {"policy.warm_up.cache": str(tmp_path / "cache")}
    plain = run_small(tmp_path / "plain", WARM).directory
    first = run_small(tmp_path / "first", {**WARM, **cache}).directory
    second = run_small(tmp_path / "second", {**WARM, **cache}).directory
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1
    assert warm_up_records(plain) == warm_up_records(first) == 1 and warm_up_records(second) == 0
    for run in (first, second):
        assert differences(trained(plain), trained(run)) == []


@pytest.mark.parametrize(
    "change",
    [{"training.seed": 5}, {"policy.warm_up.lr": 1e-4}, {"policy.tiny.hidden": 48}, {"task.left_digits": 2}],
    ids=lambda change: next(iter(change)),
)
def test_another_warm_up_is_not_taken_from_the_cache(change: dict[str, Any], tmp_path: Path) -> None:
    cache = {"policy.warm_up.cache": str(tmp_path / "cache"), "training.steps": 1, "evaluation.every_steps": 0}
    run_small(tmp_path / "one", {**WARM, **cache})
    run_small(tmp_path / "other", {**WARM, **cache, **change})
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2
