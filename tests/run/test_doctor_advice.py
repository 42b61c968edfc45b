"""The doctor's advice on learning rates: never one that failed, never a higher one for a lost run."""

from pathlib import Path
from typing import Any

from legato.health.rules import RULES
from legato.run.doctor import examine
from tests.proof.logs import finding_names, make_records, wave, write_run
from tests.proof.pages import numbers


def test_a_recovery_is_a_finding_with_its_evidence_and_factor(tmp_path: Path) -> None:
    recovery = {"kind": "recovery", "step": 40, "from": 52, "rule": "drift", "lr_scale": 0.5, "words": "back to step 40."}
    examination = examine(write_run(tmp_path, [*make_records(), recovery | {"evidence": "evidence/step-000052"}]))
    (diagnosis,) = examination.found
    (evidence,) = diagnosis.evidence
    assert evidence.startswith("back to step 40.") and "evidence/step-000052" in evidence
    assert diagnosis.causes == next(rule.causes for rule in RULES if rule.name == "drift")
    assert diagnosis.name == "recovered" and numbers(diagnosis.says) == [1] and 0.5 in numbers(diagnosis.tries[0])


def test_a_learning_rate_that_failed_is_not_recommended(tmp_path: Path) -> None:
    """The rate of a run that was stopped by the watch or lost at its last step is an upper bound, and is named."""
    recovery = {"kind": "recovery", "step": 40, "from": 52, "rule": "drift", "lr_scale": 0.125, "words": "back to step 40."}
    ended = {"kind": "end", "reason": "stopped by the health watch: gone."}
    for name, records in (
        ("stopped", [*make_records(), recovery, ended]),
        ("lost", [*make_records(sick_from=61), recovery]),
    ):
        diagnoses = examine(write_run(tmp_path / name, records, ["training.lr=0.02"], end=False)).found
        diagnosis = next(each for each in diagnoses if each.name == "recovered")
        assert "lost nevertheless" in diagnosis.says
        assert "training.lr = 0.00125 or less" in diagnosis.tries[0]
        assert numbers(diagnosis.tries[0])[:4] == [0.00125, 0.0025, 0.02, 0.125]
        assert "went on with" not in " ".join(diagnosis.tries)
    blind = write_run(tmp_path / "blind", [*make_records(), recovery | {"clip_scale": 0.5}, ended], end=False)
    (blind / "config.toml").write_text("nothing = 1")
    (diagnosis,) = examine(blind).found
    assert (
        "less than half" in diagnosis.tries[0]
        and numbers(diagnosis.tries[0]) == [0.125]
        and 0.5 in numbers(diagnosis.tries[1])
    )
    resumed = write_run(tmp_path / "resumed", [*make_records(), recovery], ["training.lr=0.02"])
    (diagnosis,) = examine(resumed).found
    (advice,) = diagnosis.tries
    assert "training.lr = 0.0025" in advice and numbers(advice) == [0.0025, 0.02, 0.125] and "less" not in advice
    (resumed / "config.toml").write_text("nothing = 1")
    (diagnosis,) = examine(resumed).found
    (advice,) = diagnosis.tries
    assert numbers(advice) == [0.125] and "less" not in advice and "training.lr" not in advice


def test_advice_after_a_recovery_names_only_what_it_changed(tmp_path: Path) -> None:
    recovery = {"kind": "recovery", "step": 40, "from": 52, "rule": "drift", "lr_scale": 1.0, "words": "back to step 40."}
    for scale, sentence in ((0.5, "clip times 0.5"), (1.0, "only the problems")):
        examination = examine(write_run(tmp_path / str(scale), [*make_records(), recovery | {"clip_scale": scale}]))
        assert sentence in examination.found[0].tries[0] and "learning rate" not in examination.found[0].tries[0]


def flat(change: float = 0.0) -> list[dict[str, Any]]:
    """A run whose reward does not move beyond its noise."""
    rewards = ((0.3 + change * (step > 50)) * wave(step) for step in range(1, 101))
    return [each | {"reward/mean": r, "accuracy/mean": r} for each, r in zip(make_records(), rewards, strict=True)]


def test_a_flat_reward_is_a_finding_and_a_falling_one_is_no_reason_for_a_higher_rate(tmp_path: Path) -> None:
    for change, higher in ((0.002, True), (-0.002, False)):
        (diagnosis,) = examine(write_run(tmp_path / str(change), flat(change))).found
        assert diagnosis.name == "no-progress"
        assert ("a higher training.lr" in diagnosis.tries) is higher
        assert any("learning rate" in cause and "too low" in cause for cause in diagnosis.causes) is higher


def test_a_run_that_was_lost_is_not_one_that_did_not_move(tmp_path: Path) -> None:
    """Found by the rules, recorded as an alarm or rolled back: the rate is not too low."""
    dead = [each | {"groups/zero_variance": 1.0} if each["step"] > 90 else each for each in flat()]
    alarm = {"kind": "finding", "rule": "drift", "level": "alarm", "step": 63}
    recovery = {"kind": "recovery", "step": 40, "from": 52, "rule": "drift", "lr_scale": 0.5, "words": "back to step 40."}
    for name, records in (("found", dead), ("recorded", [*flat(), alarm]), ("back", [*flat(), recovery])):
        assert "no-progress" not in finding_names(examine(write_run(tmp_path / name, records)))
    warning = alarm | {"level": "warning"}
    assert "no-progress" in finding_names(examine(write_run(tmp_path / "warned", [*flat(), warning])))


def test_a_policy_that_lost_its_reward_is_advised_on_the_learning_rate(tmp_path: Path) -> None:
    """With a rate a hundred times too high the reward drops to 0 within a few steps and all groups score alike."""
    dead = {"reward/mean": 0.0, "accuracy/mean": 0.0, "reward/deviation": 0.0, "groups/zero_variance": 1.0}
    records = [each | {"reward/deviation": 0.3} | (dead if each["step"] > 4 else {}) for each in make_records()]
    diagnoses = examine(write_run(tmp_path, records)).found
    diagnosis = next(each for each in diagnoses if each.name == "nothing-to-learn")
    assert any("training.lr" in line and "above 0 before" in line for line in diagnosis.tries)
    (reward,) = (line for line in diagnosis.evidence if line.startswith("reward/mean"))
    before, *since = numbers(reward)
    assert 0.4 <= before < 0.5 and since == [0, 0, 0]
    assert not any("higher training.lr" in line for each in diagnoses for line in each.tries)
