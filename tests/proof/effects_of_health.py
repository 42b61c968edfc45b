"""health.*: what they do. The actions themselves are in tests/run/test_health.py."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from legato.health import watch
from legato.health.rule import Rule
from legato.records.directory import RunDirectory
from tests.proof import verdicts
from tests.proof.effects import Bench, effect

ALWAYS = Rule(
    name="drift",
    family="test",
    level="alarm",
    metrics=("optimizer/lr",),
    test="above",
    threshold=2e-3,
    hits=1,
    of=1,
    says="It is {value}.",
    causes=("a test",),
    tries=("nothing",),
)
"""Under the name of a rule there is; a recovery with half the learning rate ends it."""

GIVEN = {
    "reward.kind": f"{verdicts.__file__}:early",
    "training.steps": 2,
    "training.lr": 3e-3,
    "output.checkpoint_every_steps": 1,
}


def run_into_alarm(bench: Bench, options: dict[str, Any]) -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("legato.health.actions.Watch", partial(watch.Watch, (ALWAYS,)))
        return bench.run({**GIVEN, **options})


def health_records(run: SimpleNamespace, kind: str) -> list[dict[str, Any]]:
    return [record for record in RunDirectory.open(run.folder).health.read() if record["kind"] == kind]


@effect("health.action", "health.recoveries", "health.lr_factor")
def what_an_alarm_does(bench: Bench) -> None:
    run = run_into_alarm(bench, {})
    assert run.run.exit_code == 0 and len(health_records(run, "finding")) == 1
    stopped = run_into_alarm(bench, {"health.action": "stop"})
    assert stopped.run.exit_code == 3 and len(stopped.steps) == 1
    recovered = run_into_alarm(bench, {"health.action": "recover", "health.lr_factor": 0.5})
    assert recovered.run.exit_code == 0 and recovered.steps[-1]["optimizer/lr"] == 1.5e-3
    exhausted = run_into_alarm(bench, {"health.action": "recover", "health.lr_factor": 0.9, "health.recoveries": 1})
    assert exhausted.run.exit_code == 3 and len(health_records(exhausted, "recovery")) == 1


@effect("health.clip_factor", "health.skip_data")
def what_a_recovery_changes(bench: Bench) -> None:
    options = {"health.action": "recover", "algorithm": "grpo"}
    both = run_into_alarm(bench, {**options, "health.clip_factor": 0.5})
    assert both.steps[-1]["clip/band_low"] == pytest.approx(0.1)
    assert health_records(both, "recovery")[0]["problems_skipped"] == 4
    same = run_into_alarm(bench, {**options, "health.skip_data": False})
    assert same.steps[-1]["clip/band_low"] == pytest.approx(0.2)
    assert health_records(same, "recovery")[0]["problems_skipped"] == 0


@effect("health.ignored", "health.evidence_steps")
def what_is_looked_at_and_kept(bench: Bench) -> None:
    silent = run_into_alarm(bench, {"health.ignored": ["drift"]})
    assert health_records(silent, "finding") == [] and not (silent.folder / "evidence").exists()
    run = run_into_alarm(bench, {"health.evidence_steps": 1})
    assert len(list((run.folder / "evidence" / "step-000001").glob("tensors-*"))) == 1
    unkept = run_into_alarm(bench, {"health.evidence_steps": 0})
    assert health_records(unkept, "finding") and not (unkept.folder / "evidence").exists()
