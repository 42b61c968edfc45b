"""Values changed by dotted path, and what is refused."""

import pytest

import legato
from legato.algorithms.catalogue import algorithm_names, entry
from legato.algorithms.cautions import cautions
from legato.algorithms.override import differences, flatten, override
from legato.objectives.clips import Clip


def test_a_field_is_set_and_the_named_value_stays_as_it_was() -> None:
    changed = legato.algorithm("gspo", {"objective.trust.clip.low": 2e-3})
    assert changed.objective.trust == (Clip(low=2e-3, high=4e-4),)
    assert legato.algorithm("gspo").objective.trust == (Clip(low=3e-4, high=4e-4),)
    assert differences(legato.algorithm("gspo"), changed) == {"objective.trust.clip.low": (3e-4, 2e-3)}


def test_a_part_is_added_removed_and_the_slot_emptied() -> None:
    added = legato.algorithm("grpo", {"objective.penalties.kl.beta": 0.04, "objective.penalties.kl.estimator": "k2"})
    assert [(p.name, p.beta, p.estimator) for p in added.objective.penalties] == [("kl", 0.04, "k2")]
    assert legato.algorithm(added, {"objective.penalties.kl": None}).objective.penalties == ()
    assert legato.algorithm(added, {"objective.trust": []}).objective.trust == ()


def test_slots_take_names_and_parts_and_fields_apply_after_them() -> None:
    value = legato.algorithm(
        "gspo",
        {
            "objective.trust.dual-clip.cap": 4,
            "objective.trust": [Clip(low=0.1, high=0.1), "dual-clip"],
            "aggregate": "token-mean",
            "advantage": "group-centre",
            "objective.ratio.level": "turn",
            "settings.training.updates_per_step": 2,
        },
    )
    assert [part.name for part in value.objective.trust] == ["clip", "dual-clip"]
    assert value.objective.trust[1].cap == 4
    assert (value.aggregate.name, value.advantage.name, value.objective.ratio.level) == (
        "token-mean",
        "group-centre",
        "turn",
    )
    assert value.settings["training.updates_per_step"] == 2


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("objective.trst.clip.low", 1, "does not exist; did you mean 'objective.trust'"),
        ("objective.trust.clip.lo", 1, "'objective.trust.clip.lo' does not exist in trust 'clip'; did you mean 'low'"),
        ("objective.trust.clamp.low", 1, "unknown trust 'clamp'"),
        ("objective.trust.clip.low", -1, "trust 'clip'.low: expected"),
        ("objective.trust", "clip", "expected a list of trust names or parts, got 'clip'"),
        ("objective.ratio", Clip(), "objective.ratio holds a ratio; 'clip' is a trust"),
        ("objective.ratio", 3, "expected the name of a ratio or such a part, got 3"),
        ("aggregate", "mean", "unknown aggregate 'mean'"),
        ("settings", 3, "needs the name of a setting"),
        ("objective.penalties.kl", 0.04, "expected None (to remove it) or a field below it, got 0.04"),
        ("advantage.lam", 1, "'advantage.lam' does not exist in advantage 'group-z'"),
    ],
)
def test_a_path_or_value_that_does_not_exist_is_refused(path: str, value: object, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        legato.algorithm("gspo", {path: value})
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gspo", {"objective.ratio.anchor": "sampler", "objective.corrections.tis.cap": 2}, "count that ratio twice"),
        ("sapo", {"objective.trust.clip.low": 0.2}, "stands alone"),
        ("reinforce", {"objective.trust.clip.low": 0.2}, "there is no ratio for 'clip'"),
        ("gspo", {"objective.trust": ["clip", "clip"]}, "twice"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        legato.algorithm(name, changes)


@pytest.mark.parametrize("name", algorithm_names())
def test_flatten_describes_every_named_algorithm_completely(name: str) -> None:
    """A preset is nothing but its slots: the flattened paths rebuild it from another member."""
    value = legato.algorithm(name)
    other = legato.algorithm("gspo" if name != "gspo" else "grpo")
    slots = {
        "advantage": value.advantage,
        "filters": list(value.filters),
        "objective.ratio": value.objective.ratio,
        "objective.trust": list(value.objective.trust),
        "objective.corrections": list(value.objective.corrections),
        "objective.penalties": list(value.objective.penalties),
        "aggregate": value.aggregate,
    }
    rebuilt = override(other, slots)
    settings = {path: setting for path, setting in flatten(value).items() if path.startswith("settings.")}
    assert {p: v for p, v in flatten(rebuilt).items() if not p.startswith("settings.")} | settings == flatten(value)


@pytest.mark.parametrize("name", algorithm_names())
def test_every_named_algorithm_has_formula_paper_and_a_word_of_caution_or_none(name: str) -> None:
    published = entry(name)
    assert published.title
    assert "J = " in published.formula
    assert published.paper
    assert published.verified or "Not verified" in cautions(published.value)[0]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gspo", {"aggregate": "token-mean"}, "weighs each response by its length"),
        ("gspo", {"objective.trust.clip.high": 0.2}, "never clips"),
        ("grpo", {"objective.trust.clip.low": 3e-4}, "clips nearly every token"),
        ("grpo", {"objective.penalties.kl.estimator": "k1"}, "zero in expectation"),
        ("grpo", {"objective.penalties.kl.beta": 0.04}, "KL(ref || pi)"),
        ("gspo", {"objective.corrections.tis.level": "product"}, "length trap"),
        ("gspo", {"objective.corrections.tis.level": "token"}, "one by one"),
        ("gspo", {"objective.ratio.anchor": "sampler"}, "noise between engine and trainer"),
        ("dr-grpo", {}, "aggregate.constant must be given"),
        ("fspo", {}, "log_low and log_high must be given"),
        ("reinforce", {}, "grows with the length"),
    ],
)
def test_cautions_depend_on_the_parts_of_an_algorithm(name: str, changes: dict[str, object], words: str) -> None:
    assert any(words in sentence for sentence in cautions(legato.algorithm(name, changes)))


def test_the_published_gspo_has_no_caution_about_clip_or_length() -> None:
    text = " ".join(cautions(legato.algorithm("gspo")))
    assert "never clips" not in text
    assert "weighs each response by its length" not in text
