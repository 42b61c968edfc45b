"""The mismatch experiment: small runs with different samplers, and the conclusions on its page."""

from pathlib import Path

import pytest

from benchmarks import mismatch
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape


@pytest.mark.parametrize(
    ("sampler", "way"), [("stale:4", "sampler"), ("int8", "recompute, TIS"), ("top-p:0.9", "recompute")]
)
def test_a_run_starts_from_the_given_weights_and_leaves_them(
    sampler: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mismatch, "STEPS", 6)
    monkeypatch.setattr(mismatch, "EVERY", 3)
    policy = load_policy("tiny", Loading(dtype="float32", device="cpu", tiny=TinyShape(hidden=32, heads=2)))
    before = {name: weight.detach().clone() for name, weight in policy.parameters().items()}
    result = mismatch.train(policy, sampler, way, 0, tmp_path)
    assert list(result["accuracy"]) == [0, 3, 6] and set(mismatch.AVERAGED) < set(result)
    assert all(bool((weight == before[name]).all()) for name, weight in policy.parameters().items())


def test_the_page_names_the_samplers_that_fall_behind() -> None:
    def accuracies(last: float) -> dict[str, object]:
        return {"0": {"accuracy": {"0": 0.4, "20": 0.5, str(mismatch.STEPS): last}, "clip/sequences@0": 0.25}}

    learning = {s: {way: accuracies(0.9) for way in mismatch.WAYS} for s in mismatch.SAMPLERS}
    learning["int8"]["sampler"] = accuracies(0.6)
    lines = mismatch._conclusions(learning, ["0"])
    assert (
        lines[0].endswith("at the end: none of them.")
        and "between 90 and 90 %" in lines[3]
        and lines[2].endswith("at the end: int8 (30 points).")
    )
    row = mismatch._learning_row("int8", learning["int8"], ["0"])
    assert row == ["int8", "50.0 -> 90.0", "50.0 -> 90.0", "50.0 -> 60.0", "25.0 %"]
