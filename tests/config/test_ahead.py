"""What follows from rollouts.ahead: the anchor is recomputed, and a correction stands between sampler and old policy."""

import pytest

from legato.config.load import dump, load
from legato.errors import InputError
from legato.objectives.corrections import GeometricRejection, RouterShift, TruncatedImportance


def corrections(*words: str) -> tuple[object, ...]:
    return load([], words).algorithm.objective.corrections


def test_without_ahead_nothing_is_added() -> None:
    resolved = load([], ["algorithm=gspo"])
    assert resolved.algorithm.objective.corrections == () and resolved.config.training.anchor == "auto"


@pytest.mark.parametrize(
    ("name", "level"), [("gspo", "sequence"), ("gspo-token", "sequence"), ("grpo", "token"), ("dapo", "token")]
)
def test_the_default_correction_has_the_level_of_the_ratio(name: str, level: str) -> None:
    resolved = load([], [f"algorithm={name}", "rollouts.ahead=1"])
    assert resolved.algorithm.objective.corrections == (TruncatedImportance(cap=2.0, level=level),)
    assert resolved.provenance["algorithm.objective.corrections"] == "rollouts.ahead"
    assert any("rollouts.ahead = 1" in note and "tis" in note for note in resolved.notes)
    assert any("corrections" in each for each in resolved.deviations)


def test_other_corrections_stay_beside_it() -> None:
    kept = corrections("algorithm=rspo", "rollouts.ahead=2")
    assert [type(each) for each in kept] == [RouterShift, TruncatedImportance]


def test_a_correction_of_the_user_or_of_the_algorithm_stays_alone() -> None:
    assert corrections("rollouts.ahead=1", "algorithm.objective.corrections=['geo-rejection']") == (GeometricRejection(),)
    assert corrections("rollouts.ahead=1", "algorithm=minirl") == corrections("algorithm=minirl")
    assert corrections("rollouts.ahead=1", "algorithm=dppo") == corrections("algorithm=dppo")


def test_no_correction_is_no_correction_and_is_told() -> None:
    resolved = load([], ["rollouts.ahead=1", "algorithm.objective.corrections=[]"])
    assert resolved.algorithm.objective.corrections == ()
    assert any("nothing corrects" in note for note in resolved.notes)


def test_the_old_policy_is_recomputed_and_the_sampler_refused_as_anchor() -> None:
    resolved = load([], ["rollouts.ahead=1"])
    assert resolved.config.training.anchor == "recompute" and resolved.provenance["training.anchor"] == "rollouts.ahead"
    with pytest.raises(
        InputError, match=r"training.anchor: expected 'auto' or 'recompute', got 'sampler'.*rollouts.ahead = 1"
    ):
        load([], ["rollouts.ahead=1", "training.anchor=sampler"])


def test_the_configuration_that_is_stored_gives_the_same_algorithm(tmp_path: object) -> None:
    resolved = load([], ["rollouts.ahead=2"])
    path = tmp_path / "config.toml"  # type: ignore[operator]
    path.write_text(dump(resolved))
    again = load([path])
    assert again.algorithm == resolved.algorithm and again.config == resolved.config
