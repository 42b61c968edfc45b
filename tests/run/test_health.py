"""The health watch in whole runs: what is said and kept, what each action does, and that resumed runs stay the same."""

import gzip
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from legato.config.load import load
from legato.core.rollout import Rollout
from legato.dashboard.board import findings
from legato.dashboard.runs import Folder
from legato.health import recovery, watch
from legato.health.rule import Rule
from legato.pages.report import write_report
from legato.records.directory import RunDirectory
from legato.run import execute
from legato.run.train import resume
from legato.run.wire import Given
from tests.proof.command import Command
from tests.proof.pages import numbers
from tests.proof.runs import Listener, cut, differences, light, outcome, records, small, state, steps, words


def early(rollout: Rollout) -> float:
    """Ones and zeros that have nothing to do with the answer."""
    return float(sum(map(ord, rollout.text)) % 2)


ILL = Rule(
    name="ill",
    family="test",
    level="alarm",
    metrics=("optimizer/lr",),
    test="above",
    threshold=2e-3,
    hits=2,
    of=3,
    says="The learning rate is {value}.",
    causes=("a test",),
    tries=("nothing",),
)
"""Alarms on the learning rate, which these runs raise by their schedule and a recovery lowers."""


@pytest.fixture(scope="module", autouse=True)
def one_rule() -> Iterator[None]:
    """A rule that is certain to hold at a known step, in place of those that wait for a run to go wrong."""
    with light(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch.Watch.__init__, "__defaults__", ((ILL,),))
        yield


RISING: dict[str, Any] = {
    "training.steps": 10,
    "training.lr": 3e-3,
    "training.warm_up_updates": 18,
    "output.checkpoint_every_steps": 1,
    "output.rollouts_every_steps": 0,
    "evaluation.every_steps": 0,
}
"""The learning rate of the next update after step s is 3e-3 (2 s + 1) / 18: above 2e-3 from step 6 on."""


RECOVER = {"health.action": "recover", "health.lr_factor": 0.25}


def run(folder: Path, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return small(folder, {**RISING, **(options or {})}, reward=early, **arguments)


def remembered(folder: Path, options: dict[str, Any]) -> SimpleNamespace:
    listener, reports = Listener(), list[Any]()
    ended = run(folder, options, watcher=listener, callback=reports.append)
    return SimpleNamespace(ended=ended, directory=ended.directory, said=listener.said, reports=reports)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run that says so and goes on."""
    return remembered(tmp_path_factory.mktemp("said"), {})


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One that recovers."""
    return remembered(tmp_path_factory.mktemp("recovered"), {**RECOVER, "output.rollouts_every_steps": 3})


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    told = [*records(folder), *RunDirectory.open(folder).health.read()]
    return [record for record in told if record["kind"] == kind]


def test_an_alarm_is_printed_recorded_and_kept_with_its_evidence(said: SimpleNamespace) -> None:
    assert said.ended.exit_code == 0 and said.ended.reason == "all steps done"
    (found,) = of_kind(said.directory, "finding")
    assert found["rule"] == "ill" and found["level"] == "alarm" and (found["since"], found["step"]) == (6, 7)
    (line,) = (line for line in said.said.splitlines() if line.startswith("alarm at step 7"))
    assert found["words"] in line and "(ill)" in line
    folder = said.directory / found["evidence"]
    assert folder == said.directory / "evidence" / "step-000007" and str(folder) in said.said
    assert [each["rule"] for each in json.loads((folder / "finding.json").read_text())] == ["ill"]
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in told] == [1, 2, 3, 4, 5, 6, 7]
    recorded = steps(said.directory)[2]
    assert {key: told[2][key] for key in ("reward/mean", "drift/k3")} == {
        key: recorded[key] for key in ("reward/mean", "drift/k3")
    }
    assert sorted(path.name for path in folder.glob("rollouts-*")) == [f"rollouts-00000{n}.jsonl.gz" for n in (5, 6, 7)]


def test_the_tensors_of_the_evidence_are_those_of_its_rollouts(said: SimpleNamespace) -> None:
    """Rows of the tensors are the rollouts beside them, and both are those of the step."""
    folder = said.directory / "evidence" / "step-000007"
    written = [json.loads(line) for line in gzip.decompress((folder / "rollouts-000006.jsonl.gz").read_bytes()).splitlines()]
    tensors = load_file(folder / "tensors-000006.safetensors")
    members = [member for group in said.reports[5].groups for member in group.members]
    assert [each["text"] for each in written] == [member.rollout.text for member in members]
    assert tensors["rewards"].tolist() == [each["reward"] for each in written]
    for row, member in enumerate(members):
        length = int(tensors["lengths"][row])
        assert tensors["tokens"][row, :length].tolist() == member.rollout.tokens.tolist()
        assert tensors["sampler_logprobs"][row, :length].tolist() == member.rollout.sampler_logprobs.tolist()
    assert {"mask", "group", "advantages", "old_logprobs"} <= {*tensors}


def test_stop_ends_with_exit_code_3_and_the_state_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = {"health.action": "stop", "output.checkpoint_every_steps": 100, "reward.kind": f"{__file__}:early"}
    code, out, _ = Command(monkeypatch, capfd)("train", *words(tmp_path, {**RISING, **stop}))
    assert code == 3
    told, folder = " ".join(out.split()), tmp_path / "run"
    assert f"legato train {folder}/config.toml output.name=run-2 training.lr=0.0015 (" in told
    (found,) = of_kind(folder, "finding")
    assert found["rule"] == "ill" and found["words"] in told
    assert of_kind(folder, "end")[-1]["step"] == 7 == len(steps(folder))
    assert RunDirectory.open(folder).checkpoint_steps()[-1] == 7
    changed = ["training.lr=0.0015", "health.action=recover"]
    assert resume(folder, changed, allow_changes=True).exit_code == 0 and len(steps(folder)) == 10


def test_the_command_after_a_stop_goes_back_to_the_healthy_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = {"health.action": "stop", "reward.kind": f"{__file__}:early", "output.keep_last": 1}
    legato, folder = Command(monkeypatch, capfd), tmp_path / "run"
    code, out, _ = legato("train", *words(tmp_path, {**RISING, **stop}))
    assert code == 3 and of_kind(folder, "end")[-1]["healthy"] == 1  # five steps before the first sign, at 6
    told = re.search(rf"next legato (resume {folder} --step 1 .*?) \((.*?)\)", " ".join(out.split()))
    assert told is not None
    assert "training.lr=0.0015" in told.group(1).split() and {0.0015, 0.003, 1} <= {*numbers(told.group(2))}
    assert legato(*told.group(1).split())[0] == 0
    assert [each["step"] for each in steps(folder)] == list(range(1, 11)) and of_kind(folder, "finding") == []
    assert (folder / "given-up" / "step-000007" / "evidence" / "step-000007" / "finding.json").is_file()


def test_an_alarm_that_ended_a_run_acts_again_where_it_is_resumed(tmp_path: Path) -> None:
    """It holds on: silent for having been told, it would let a dead policy train to the end."""
    folder = run(tmp_path, {"health.action": "stop"}).directory
    assert len(steps(folder)) == 7
    assert resume(folder, given=_given()).exit_code == 3 and len(steps(folder)) == 8
    ended = resume(folder, ["health.action=recover", "health.lr_factor=0.25"], given=_given(), allow_changes=True)
    assert ended.exit_code == 0 and len(steps(folder)) == 10
    assert [record["rule"] for record in of_kind(folder, "recovery")] == ["ill"]
    assert of_kind(folder, "recovery")[0]["step"] < 6


def test_an_alarm_that_was_only_printed_acts_after_a_resume_with_another_action(
    tmp_path: Path, said: SimpleNamespace
) -> None:
    again = cut(said.directory, tmp_path, 8)
    assert resume(again, ["health.action=stop"], given=_given(), allow_changes=True).exit_code == 3
    assert len(steps(again)) == 9


def test_the_time_left_counts_the_steps_that_were_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is looked at once a step and then says a second more, a step is a second, though the run went back."""
    told: list[tuple[int, float]] = []

    class Clocked(Listener):
        def step(self, step: int, steps: int, metrics: Any, evaluation: Any, seconds_left: float | None) -> None:
            super().step(step, steps, metrics, evaluation, seconds_left)
            told.append((steps - step, seconds_left or 0.0))

    monkeypatch.setattr(execute, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    run(tmp_path, RECOVER, watcher=Clocked())
    assert len(told) > 10 and all(seconds == pytest.approx(remaining) for remaining, seconds in told)


def _given() -> Given:
    return Given(reward=early)


def test_a_pause_waits_for_a_person(tmp_path: Path) -> None:
    listener = Listener()
    file = tmp_path / "run" / "continue"
    waited: list[float] = []

    def person() -> None:
        while "paused" not in listener.said:
            time.sleep(0.01)
        waited.append(len(listener.steps))
        time.sleep(0.2)
        waited.append(len(listener.steps))
        file.touch()

    thread = threading.Thread(target=person, daemon=True)
    thread.start()
    ended = run(tmp_path, {"health.action": "pause"}, watcher=listener)
    thread.join(5)
    assert waited == [7, 7] and ended.exit_code == 0 and len(steps(ended.directory)) == 10
    assert "going on" in listener.said and not file.exists()
    last = RunDirectory.open(ended.directory).checkpoint_path(10)
    assert json.loads((last / "trainer.json").read_text())["health"]["answered"] == ["ill"]


def test_a_recovery_goes_back_changes_something_and_goes_on(recovered: SimpleNamespace) -> None:
    assert recovered.ended.exit_code == 0
    (done,) = of_kind(recovered.directory, "recovery")
    assert (done["step"], done["from"], done["rule"], done["lr_scale"]) == (1, 7, "ill", 0.25)
    assert done["problems_skipped"] == 6 * 4 and done["evidence"] == "evidence/step-000007"
    assert [each["kind"] for each in RunDirectory.open(recovered.directory).health.read()] == ["finding", "recovery"]
    (line,) = (line for line in recovered.said.splitlines() if line.startswith("recovery"))
    assert numbers(line) == [1, 3, 7, 1, 0.25, 24]
    found = steps(recovered.directory)
    assert [record["step"] for record in found] == list(range(1, 11))
    assert [record["optimizer/lr"] for record in found][1:4] == pytest.approx([0.25 * 3e-3 * n / 18 for n in (5, 7, 9)])
    given_up = (recovered.directory / "evidence" / "step-000007" / "abandoned.jsonl").read_text().splitlines()
    assert [r["step"] for r in map(json.loads, given_up) if r["kind"] == "step"] == [2, 3, 4, 5, 6, 7]


def test_rollouts_of_steps_that_were_given_up_are_not_taken_for_those_of_the_run(recovered: SimpleNamespace) -> None:
    directory = RunDirectory.open(recovered.directory)
    folder = directory.path / "evidence" / "step-000007"
    assert sorted(path.name for path in folder.glob("abandoned-*")) == [f"abandoned-00000{n}.jsonl.gz" for n in (3, 6)]
    assert directory.rollout_steps() == [0, 3, 6, 9, 10]
    given_up = gzip.decompress((folder / "abandoned-000006.jsonl.gz").read_bytes()).splitlines()
    members = [member for group in recovered.reports[5].groups for member in group.members]
    assert [json.loads(line)["text"] for line in given_up] == [member.rollout.text for member in members]


def test_the_dashboard_and_the_report_show_what_happened(recovered: SimpleNamespace) -> None:
    folder = Folder(recovered.directory.parent)
    row = folder.run("run").row()
    assert (row["health"], row["findings"]) == ("alarm", 1)
    alarm, done = findings(folder, ["run"])
    (found,) = of_kind(recovered.directory, "finding")
    assert alarm == {
        "run": "run",
        "what": "alarm",
        "level": "alarm",
        "step": 7,
        "rule": "ill",
        "words": found["words"],
        "evidence": "evidence/step-000007",
        "causes": (),
        "tries": (),
        "doctor": f"legato doctor {recovered.directory}",
    }
    assert (done["what"], done["step"], done["evidence"]) == ("recovery", 7, "evidence/step-000007")
    text = write_report(RunDirectory.open(recovered.directory)).read_text()
    assert "1 alarm, 1 recovery" in text
    assert found["words"] in text and "(evidence/step-000007)" in text


def seen_before(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Will hold as `before` the state of the checkpoint that a recovery goes back to, as it was until then."""
    seen: dict[str, Any] = {}
    give_up = recovery.checkpoint.give_up

    def look(checkpoints: Path, last: Path, best: str | None) -> Any:
        seen["before"] = state(last)
        return give_up(checkpoints, last, best)

    monkeypatch.setattr(recovery.checkpoint, "give_up", look)
    return seen


def test_a_recovery_loads_the_checkpoint_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments and generators of the step gone back to, in the memory they had."""
    seen = seen_before(monkeypatch)
    addresses: list[tuple[int, ...]] = []
    made = recovery.take_weights

    def taken(policy: Any, *rest: Any) -> None:
        addresses.append(tuple(weight.data_ptr() for weight in policy.model.parameters()))
        made(policy, *rest)
        addresses.append(tuple(weight.data_ptr() for weight in policy.model.parameters()))

    monkeypatch.setattr(recovery, "take_weights", taken)
    ended = run(tmp_path, {**RECOVER, "output.keep_last": 100})
    after = state(ended.directory / "checkpoints" / "step-000001")
    same = ("model/model.safetensors", "optimizer.safetensors", "random.safetensors")
    assert {name: seen["before"][name] for name in same} == {name: after[name] for name in same}
    assert addresses[0] == addresses[1]
    assert after["trainer.json/optimizer"]["scale"] == 0.25
    assert not list((ended.directory / "checkpoints").glob(".*"))


@pytest.mark.parametrize("options", [{"policy.lora.rank": 2}, {"algorithm": "ppo", "policy.dtype": "bfloat16"}])
def test_every_kind_of_policy_recovers(options: dict[str, Any], tmp_path: Path) -> None:
    ended = run(tmp_path, {**RECOVER, **options})
    assert ended.exit_code == 0 and len(of_kind(ended.directory, "recovery")) == 1


def test_recoveries_are_bounded_and_each_goes_further_back(tmp_path: Path) -> None:
    given = {"health.action": "recover", "health.lr_factor": 1.0, "health.recoveries": 2, "output.keep_last": 100}
    ended = run(tmp_path, {**given, "training.steps": 15, "training.warm_up_updates": 28})
    assert ended.exit_code == 3 and "recovered 2 times" in ended.reason
    found = of_kind(ended.directory, "recovery")
    assert [(each["from"], each["step"]) for each in found] == [(10, 4), (10, 0)]
    assert len(steps(ended.directory)) == 10
    folders = sorted(path.name for path in (ended.directory / "evidence").iterdir())
    assert folders == ["step-000010", "step-000010-2", "step-000010-3"]
    assert [each["evidence"] for each in found] == [f"evidence/{name}" for name in folders[:2]]


@pytest.mark.parametrize(("margin", "before"), [(0, False), (5, True)])
def test_the_command_after_a_failed_recovery_gives_the_learning_rate_it_names(
    margin: int, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half of what failed last, whether the checkpoint to go back to is from before the recovery or keeps its factor."""
    given = {"health.action": "recover", "health.lr_factor": 0.8, "health.recoveries": 1, "training.steps": 15}
    legato = Command(monkeypatch, capfd)
    monkeypatch.setattr("legato.health.actions.MARGIN", margin)
    code, out, _ = legato("train", *words(tmp_path, {**RISING, **given, "reward.kind": f"{__file__}:early"}))
    assert code == 3 and len(of_kind(tmp_path / "run", "recovery")) == 1
    told = re.search(r"resume (.*) \(a learning rate of ([\d.]+), half of the ([\d.]+) it was", " ".join(out.split()))
    assert told is not None and before == ("training.lr times 0.8" not in " ".join(out.split()))
    rate, failed = float(told[2]), float(told[3])
    assert failed == pytest.approx(0.8 * 3e-3) and rate == failed / 2
    assert before == ("health.recoveries=2" not in told[1]), "those of the checkpoint are counted on"
    code, _, error = legato("resume", *told[1].split())
    assert code == 0, error
    assert steps(tmp_path / "run")[-1]["optimizer/lr"] == pytest.approx(rate)
    assert max(each["optimizer/lr"] for each in steps(tmp_path / "run")) <= failed


def test_a_tightened_clip_is_kept(tmp_path: Path) -> None:
    given = {**RECOVER, "health.clip_factor": 0.5, "health.skip_data": False, "algorithm": "grpo"}
    ended = run(tmp_path, given)
    found = steps(ended.directory)
    assert found[0]["clip/band_high"] == pytest.approx(0.2) and found[-1]["clip/band_high"] == pytest.approx(0.1)
    assert of_kind(ended.directory, "recovery")[0]["problems_skipped"] == 0
    longer = resume(ended.directory, ["training.steps=11"], given=_given())
    assert steps(longer.directory)[-1]["clip/band_high"] == pytest.approx(0.1)


def test_a_checkpoint_to_go_back_to_is_never_purged(tmp_path: Path) -> None:
    """Of the newest one alone, the only one there was at the alarm, the signs were on already."""
    ended = run(tmp_path, {**RECOVER, "output.keep_last": 1, "training.steps": 10})
    assert of_kind(ended.directory, "recovery")[0]["step"] == 0


@pytest.mark.parametrize(("action", "step"), [("say", 6), ("say", 7), ("recover", 2), ("recover", 8)])
def test_a_resumed_run_equals_the_straight_one(action: str, step: int, said: Path, recovered: Path, tmp_path: Path) -> None:
    """Cut before, at and after the alarm; a recovery that was done is not forgotten."""
    straight = (said if action == "say" else recovered).directory
    again = cut(straight, tmp_path, step)
    resume(again, given=_given())
    assert differences(outcome(straight), outcome(again)) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["health.ignored=['drfit']"], "did you mean 'drift'"),
        (["health.lr_factor=0.3"], r"health\.lr_factor.*health\.action"),
        (["health.action=recover", "output.checkpoint_every_steps=0"], r"output\.checkpoint_every_steps"),
        (["health.action=recover", "health.lr_factor=1.0", "health.skip_data=false"], "would repeat"),
        (["health.action=panic"], "health.action"),
        (["algorithm=gspo-auto", "health.action=recover", "health.clip_factor=0.5"], "no effect on 'auto-clip'"),
    ],
)
def test_health_options_that_disagree_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load([], words)
