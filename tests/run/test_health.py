"""The health watch in whole runs: its messages and records, its actions, and that resumed runs stay the same."""

import gzip
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
from legato.run.wire import PythonObjects
from tests.proof.command import Command
from tests.proof.pages import numbers
from tests.proof.runs import Listener, cut_run, differences, light, outcome, records, run_small, state, steps, words


def early(rollout: Rollout) -> float:
    """A reward of 0 or 1 that does not depend on the answer."""
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
    """Replace the rules by one that holds at a known step."""
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
    return run_small(folder, {**RISING, **(options or {})}, reward=early, **arguments)


def run_and_record(folder: Path, options: dict[str, Any]) -> SimpleNamespace:
    listener, reports = Listener(), list[Any]()
    ended = run(folder, options, watcher=listener, callback=reports.append)
    return SimpleNamespace(ended=ended, directory=ended.directory, said=listener.said, reports=reports)


@pytest.fixture(scope="module")
def printed_alarm(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run whose health watch prints an alarm and goes on."""
    return run_and_record(tmp_path_factory.mktemp("printed-alarm"), {})


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run that recovers from an alarm."""
    return run_and_record(tmp_path_factory.mktemp("recovered"), {**RECOVER, "output.rollouts_every_steps": 3})


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [*records(folder), *RunDirectory.open(folder).health.read()]
    return [record for record in lines if record["kind"] == kind]


def test_an_alarm_is_printed_and_recorded_with_its_evidence(printed_alarm: SimpleNamespace) -> None:
    assert printed_alarm.ended.exit_code == 0 and printed_alarm.ended.reason == "all steps done"
    (finding,) = of_kind(printed_alarm.directory, "finding")
    assert finding["rule"] == "ill" and finding["level"] == "alarm" and (finding["since"], finding["step"]) == (6, 7)
    (line,) = (line for line in printed_alarm.said.splitlines() if line.startswith("alarm at step 7"))
    assert finding["words"] in line and "(ill)" in line
    folder = printed_alarm.directory / finding["evidence"]
    assert folder == printed_alarm.directory / "evidence" / "step-000007" and str(folder) in printed_alarm.said
    assert [each["rule"] for each in json.loads((folder / "finding.json").read_text())] == ["ill"]
    stored = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in stored] == [1, 2, 3, 4, 5, 6, 7]
    logged = steps(printed_alarm.directory)[2]
    assert {key: stored[2][key] for key in ("reward/mean", "drift/k3")} == {
        key: logged[key] for key in ("reward/mean", "drift/k3")
    }
    assert sorted(path.name for path in folder.glob("rollouts-*")) == [f"rollouts-00000{n}.jsonl.gz" for n in (5, 6, 7)]


def test_the_tensors_of_the_evidence_are_those_of_its_rollouts(printed_alarm: SimpleNamespace) -> None:
    """Rows of the tensors are the rollouts beside them, and both are those of the step."""
    folder = printed_alarm.directory / "evidence" / "step-000007"
    written = [json.loads(line) for line in gzip.decompress((folder / "rollouts-000006.jsonl.gz").read_bytes()).splitlines()]
    tensors = load_file(folder / "tensors-000006.safetensors")
    members = [member for group in printed_alarm.reports[5].groups for member in group.members]
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
    text, folder = " ".join(out.split()), tmp_path / "run"
    assert f"legato train {folder}/config.toml output.name=run-2 training.lr=0.0015 (" in text
    (finding,) = of_kind(folder, "finding")
    assert finding["rule"] == "ill" and finding["words"] in text
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
    advice = re.search(rf"next legato (resume {folder} --step 1 .*?) \((.*?)\)", " ".join(out.split()))
    assert advice is not None
    assert "training.lr=0.0015" in advice.group(1).split() and {0.0015, 0.003, 1} <= {*numbers(advice.group(2))}
    assert legato(*advice.group(1).split())[0] == 0
    assert [each["step"] for each in steps(folder)] == list(range(1, 11)) and of_kind(folder, "finding") == []
    assert (folder / "given-up" / "step-000007" / "evidence" / "step-000007" / "finding.json").is_file()


def test_an_alarm_that_ended_a_run_ends_it_again_after_a_resume(tmp_path: Path) -> None:
    """An alarm that stayed silent because it was shown before would let a dead policy train to the end."""
    folder = run(tmp_path, {"health.action": "stop"}).directory
    assert len(steps(folder)) == 7
    assert resume(folder, objects=_inputs()).exit_code == 3 and len(steps(folder)) == 8
    ended = resume(folder, ["health.action=recover", "health.lr_factor=0.25"], objects=_inputs(), allow_changes=True)
    assert ended.exit_code == 0 and len(steps(folder)) == 10
    assert [record["rule"] for record in of_kind(folder, "recovery")] == ["ill"]
    assert of_kind(folder, "recovery")[0]["step"] < 6


def test_an_alarm_that_was_only_printed_acts_after_a_resume_with_another_action(
    tmp_path: Path, printed_alarm: SimpleNamespace
) -> None:
    again = cut_run(printed_alarm.directory, tmp_path, 8)
    assert resume(again, ["health.action=stop"], objects=_inputs(), allow_changes=True).exit_code == 3
    assert len(steps(again)) == 9


def test_the_time_left_counts_abandoned_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances one second per step, so the time left equals the steps left, although the run went back."""
    estimates: list[tuple[int, float]] = []

    class Clocked(Listener):
        def step(self, step: int, steps: int, metrics: Any, evaluation: Any, seconds_left: float | None) -> None:
            super().step(step, steps, metrics, evaluation, seconds_left)
            estimates.append((steps - step, seconds_left or 0.0))

    monkeypatch.setattr(execute, "time", SimpleNamespace(perf_counter=lambda: float(len(estimates))))
    run(tmp_path, RECOVER, watcher=Clocked())
    # The first step has no estimate: it also compiles and measures.
    assert len(estimates) > 10 and all(seconds == pytest.approx(remaining) for remaining, seconds in estimates[1:])


def _inputs() -> PythonObjects:
    return PythonObjects(reward=early)


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
    (entry,) = of_kind(recovered.directory, "recovery")
    assert (entry["step"], entry["from"], entry["rule"], entry["lr_scale"]) == (1, 7, "ill", 0.25)
    assert entry["problems_skipped"] == 6 * 4 and entry["evidence"] == "evidence/step-000007"
    assert [each["kind"] for each in RunDirectory.open(recovered.directory).health.read()] == ["finding", "recovery"]
    (line,) = (line for line in recovered.said.splitlines() if line.startswith("recovery"))
    assert numbers(line) == [1, 3, 7, 1, 0.25, 24]
    logged = steps(recovered.directory)
    assert [record["step"] for record in logged] == list(range(1, 11))
    assert [record["optimizer/lr"] for record in logged][1:4] == pytest.approx([0.25 * 3e-3 * n / 18 for n in (5, 7, 9)])
    abandoned = (recovered.directory / "evidence" / "step-000007" / "abandoned.jsonl").read_text().splitlines()
    assert [r["step"] for r in map(json.loads, abandoned) if r["kind"] == "step"] == [2, 3, 4, 5, 6, 7]


def test_rollouts_of_abandoned_steps_move_to_the_evidence(recovered: SimpleNamespace) -> None:
    directory = RunDirectory.open(recovered.directory)
    folder = directory.path / "evidence" / "step-000007"
    assert sorted(path.name for path in folder.glob("abandoned-*")) == [f"abandoned-00000{n}.jsonl.gz" for n in (3, 6)]
    assert directory.rollout_steps() == [0, 3, 6, 9, 10]
    abandoned = gzip.decompress((folder / "abandoned-000006.jsonl.gz").read_bytes()).splitlines()
    members = [member for group in recovered.reports[5].groups for member in group.members]
    assert [json.loads(line)["text"] for line in abandoned] == [member.rollout.text for member in members]


def test_the_dashboard_and_the_report_show_the_alarm_and_the_recovery(recovered: SimpleNamespace) -> None:
    folder = Folder(recovered.directory.parent)
    row = folder.run("run").row()
    assert (row["health"], row["findings"]) == ("alarm", 1)
    alarm, recovery_row = findings(folder, ["run"])
    (finding,) = of_kind(recovered.directory, "finding")
    assert alarm == {
        "run": "run",
        "what": "alarm",
        "level": "alarm",
        "step": 7,
        "steps": [7],
        "rule": "ill",
        "words": finding["words"],
        "evidence": "evidence/step-000007",
        "causes": (),
        "tries": (),
        "doctor": f"legato doctor {recovered.directory}",
    }
    assert (recovery_row["what"], recovery_row["step"], recovery_row["evidence"]) == ("recovery", 7, "evidence/step-000007")
    text = write_report(RunDirectory.open(recovered.directory)).read_text()
    assert "1 alarm, 1 recovery" in text
    assert finding["words"] in text and "(evidence/step-000007)" in text


def record_state_before_recovery(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A dictionary that gets, as `before`, the state of the checkpoint that a recovery goes back to."""
    states: dict[str, Any] = {}
    give_up = recovery.checkpoint.give_up

    def record(checkpoints: Path, last: Path, best: str | None) -> Any:
        states["before"] = state(last)
        return give_up(checkpoints, last, best)

    monkeypatch.setattr(recovery.checkpoint, "give_up", record)
    return states


def test_a_recovery_restores_the_checkpoint_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments and generators equal the checkpoint's, and the weights keep their addresses."""
    states = record_state_before_recovery(monkeypatch)
    addresses: list[tuple[int, ...]] = []
    take_weights = recovery.take_weights

    def record_addresses(policy: Any, *rest: Any) -> None:
        addresses.append(tuple(weight.data_ptr() for weight in policy.model.parameters()))
        take_weights(policy, *rest)
        addresses.append(tuple(weight.data_ptr() for weight in policy.model.parameters()))

    monkeypatch.setattr(recovery, "take_weights", record_addresses)
    ended = run(tmp_path, {**RECOVER, "output.keep_last": 100})
    after = state(ended.directory / "checkpoints" / "step-000001")
    same = ("model/model.safetensors", "optimizer.safetensors", "random.safetensors")
    assert {name: states["before"][name] for name in same} == {name: after[name] for name in same}
    assert addresses[0] == addresses[1]
    assert after["trainer.json/optimizer"]["scale"] == 0.25
    assert not list((ended.directory / "checkpoints").glob(".*"))


@pytest.mark.parametrize("options", [{"policy.lora.rank": 2}, {"algorithm": "ppo", "policy.dtype": "bfloat16"}])
def test_every_kind_of_policy_recovers(options: dict[str, Any], tmp_path: Path) -> None:
    ended = run(tmp_path, {**RECOVER, **options})
    assert ended.exit_code == 0 and len(of_kind(ended.directory, "recovery")) == 1


def test_recoveries_are_bounded_and_each_goes_further_back(tmp_path: Path) -> None:
    options = {"health.action": "recover", "health.lr_factor": 1.0, "health.recoveries": 2, "output.keep_last": 100}
    ended = run(tmp_path, {**options, "training.steps": 15, "training.warm_up_updates": 28})
    assert ended.exit_code == 3 and "recovered 2 times" in ended.reason
    recoveries = of_kind(ended.directory, "recovery")
    assert [(each["from"], each["step"]) for each in recoveries] == [(10, 4), (10, 0)]
    assert len(steps(ended.directory)) == 10
    folders = sorted(path.name for path in (ended.directory / "evidence").iterdir())
    assert folders == ["step-000010", "step-000010-2", "step-000010-3"]
    assert [each["evidence"] for each in recoveries] == [f"evidence/{name}" for name in folders[:2]]


@pytest.mark.parametrize(("margin", "before"), [(0, False), (5, True)])
def test_the_command_after_a_failed_recovery_gives_the_learning_rate_it_names(
    margin: int, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half of the rate that failed last, whether or not the checkpoint already has the factor of the recovery."""
    options = {"health.action": "recover", "health.lr_factor": 0.8, "health.recoveries": 1, "training.steps": 15}
    legato = Command(monkeypatch, capfd)
    monkeypatch.setattr("legato.health.actions.MARGIN", margin)
    code, out, _ = legato("train", *words(tmp_path, {**RISING, **options, "reward.kind": f"{__file__}:early"}))
    assert code == 3 and len(of_kind(tmp_path / "run", "recovery")) == 1
    advice = re.search(r"resume (.*) \(a learning rate of ([\d.]+), half of the ([\d.]+) it was", " ".join(out.split()))
    assert advice is not None and before == ("training.lr times 0.8" not in " ".join(out.split()))
    rate, failed = float(advice[2]), float(advice[3])
    assert failed == pytest.approx(0.8 * 3e-3) and rate == failed / 2
    assert before == ("health.recoveries=2" not in advice[1]), "recoveries of the checkpoint count"
    code, _, error = legato("resume", *advice[1].split())
    assert code == 0, error
    assert steps(tmp_path / "run")[-1]["optimizer/lr"] == pytest.approx(rate)
    assert max(each["optimizer/lr"] for each in steps(tmp_path / "run")) <= failed


def test_a_tightened_clip_is_kept(tmp_path: Path) -> None:
    options = {**RECOVER, "health.clip_factor": 0.5, "health.skip_data": False, "algorithm": "grpo"}
    ended = run(tmp_path, options)
    logged = steps(ended.directory)
    assert logged[0]["clip/band_high"] == pytest.approx(0.2) and logged[-1]["clip/band_high"] == pytest.approx(0.1)
    assert of_kind(ended.directory, "recovery")[0]["problems_skipped"] == 0
    longer = resume(ended.directory, ["training.steps=11"], objects=_inputs())
    assert steps(longer.directory)[-1]["clip/band_high"] == pytest.approx(0.1)


def test_a_checkpoint_to_go_back_to_is_never_purged(tmp_path: Path) -> None:
    """With keep_last = 1 the newest checkpoint already shows the first signs, so an older one must stay."""
    ended = run(tmp_path, {**RECOVER, "output.keep_last": 1, "training.steps": 10})
    assert of_kind(ended.directory, "recovery")[0]["step"] == 0


@pytest.mark.parametrize(("action", "step"), [("say", 6), ("say", 7), ("recover", 2), ("recover", 8)])
def test_a_resumed_run_equals_the_straight_one(
    action: str, step: int, printed_alarm: Path, recovered: Path, tmp_path: Path
) -> None:
    """Cut before, at and after the alarm; a finished recovery is not repeated."""
    straight = (printed_alarm if action == "say" else recovered).directory
    again = cut_run(straight, tmp_path, step)
    resume(again, objects=_inputs())
    assert differences(outcome(straight), outcome(again)) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["health.ignored=['drfit']"], "did you mean 'drift'"),
        (["health.lr_factor=0.3"], r"health\.lr_factor.*health\.action"),
        (["health.action=recover", "output.checkpoint_every_steps=0"], r"output\.checkpoint_every_steps"),
        (["health.action=recover", "health.lr_factor=1.0", "health.skip_data=false"], "would repeat"),
        (["health.action=panic"], "health.action"),
        (["algorithm=gspo-auto", "health.action=recover", "health.clip_factor=0.5"], "no effect on 'auto-clip'"),
    ],
)
def test_health_options_that_disagree_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load([], words)
