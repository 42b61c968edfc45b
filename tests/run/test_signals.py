"""Signals and other processes: a step is finished, the state is saved, and the resumed run equals the straight one."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from legato.config.load import load
from legato.records.directory import RunDirectory
from legato.records.lock import hold_lock
from legato.run import wire
from legato.run.interrupt import ENDING
from legato.run.train import resume, start
from tests.proof import verdicts
from tests.proof.runs import Listener, differences, outcome, run_small, words

SLOW = f"{verdicts.__file__}:slow"
OPTIONS = {
    "reward.kind": SLOW,
    "training.steps": 6,
    "evaluation.every_steps": 3,
    "output.checkpoint_every_steps": 2,
    "output.rollouts_every_steps": 2,
}


pytestmark = pytest.mark.usefixtures("lightly")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEGATO_TEST_SLEEP", "0")
        return run_small(tmp_path_factory.mktemp("straight"), OPTIONS).directory


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_TEST_SLEEP", "0")


def differences_beyond_saves(one: Path, other: Path) -> list[str]:
    """Names of differing outcomes. An extra checkpoint and the state of global generators do not count."""
    names = differences(outcome(one, checkpoints=False), outcome(other, checkpoints=False))
    return [name for name in names if name not in ("trainer.json/generators", "random.safetensors")]


# Signals in this process


def send_signals_at(step: int, *signals: signal.Signals) -> Callable[[Any], None]:
    def send(report: Any) -> None:
        if report.step == step:
            for number in signals:
                os.kill(os.getpid(), number)
            time.sleep(0.01)

    return send


@pytest.mark.parametrize(
    ("number", "code", "step"),
    [
        *((number, code, step) for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)) for step in (1, 4, 6)),
        (signal.SIGHUP, 129, 3),
        (signal.SIGUSR1, 138, 3),
    ],
)
def test_a_signal_ends_the_run_after_the_step_with_the_state_saved(
    number: signal.Signals, code: int, step: int, straight: Path, tmp_path: Path
) -> None:
    listener = Listener()
    before = signal.getsignal(number)
    run = run_small(tmp_path, OPTIONS, callback=send_signals_at(step, number), watcher=listener)
    assert run.exit_code == code
    assert number.name in run.reason
    assert any(message.startswith(number.name) for message in listener.messages)
    assert listener.steps[-1] == step
    assert RunDirectory.open(run.directory).checkpoint_steps()[-1] == step
    assert signal.getsignal(number) == before
    assert resume(run.directory).exit_code == 0
    assert differences_beyond_saves(straight, run.directory) == []


def test_sigusr2_saves_and_the_run_goes_on(straight: Path, tmp_path: Path) -> None:
    listener = Listener()
    before = signal.getsignal(signal.SIGUSR2)
    run = run_small(tmp_path, OPTIONS, callback=send_signals_at(3, signal.SIGUSR2, signal.SIGUSR2), watcher=listener)
    assert run.exit_code == 0 and signal.getsignal(signal.SIGUSR2) == before
    assert "saved step 3; going on" in listener.messages
    assert {3, 6} <= {*RunDirectory.open(run.directory).checkpoint_steps()}
    assert differences_beyond_saves(straight, run.directory) == []


def test_sigusr2_before_the_first_step_ends_nothing(tmp_path: Path) -> None:
    class Impatient(Listener):
        def warm_up(self, step: int, steps: int, loss: float) -> None:
            os.kill(os.getpid(), signal.SIGUSR2)

    listener = Impatient()
    options = {**OPTIONS, "policy.warm_up.steps": 1, "training.steps": 1}
    assert run_small(tmp_path, options, watcher=listener).exit_code == 0
    assert any("no state to save" in message for message in listener.messages)


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGHUP, signal.SIGHUP), 129),
        ((signal.SIGUSR1, signal.SIGTERM), 143),
        ((signal.SIGTERM, signal.SIGHUP), 143),
    ],
)
def test_terminals_and_batch_systems_that_send_two_signals_do_not_stop_the_save(
    signals: tuple[signal.Signals, ...], code: int, tmp_path: Path
) -> None:
    run = run_small(tmp_path, OPTIONS, callback=send_signals_at(1, *signals))
    assert run.exit_code == code and RunDirectory.open(run.directory).checkpoint_steps() == [1]


def test_a_run_under_nohup_ignores_sighup(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        options = {**OPTIONS, "training.steps": 2}
        assert run_small(tmp_path, options, callback=send_signals_at(1, signal.SIGHUP)).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_the_first_step_saves_step_0(tmp_path: Path) -> None:
    sent = []

    def reward(rollout: Any) -> float:
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return verdicts.slow(rollout)

    options = {path: value for path, value in OPTIONS.items() if path != "reward.kind"}
    uncut = run_small(tmp_path / "uncut", options, reward=verdicts.slow).directory
    reward.__name__ = "slow"
    run = run_small(tmp_path, options, reward=reward)
    assert run.exit_code == 143
    assert RunDirectory.open(run.directory).checkpoint_steps() == [0]
    resume(run.directory, objects=wire.PythonObjects(reward=reward))
    assert differences_beyond_saves(uncut, run.directory) == []


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGTERM, signal.SIGTERM), 143),
        ((signal.SIGTERM, signal.SIGINT), 130),
    ],
)
def test_a_second_signal_stops_at_once(
    signals: tuple[signal.Signals, ...], code: int, straight: Path, tmp_path: Path
) -> None:
    before = [signal.getsignal(number) for number in (*ENDING, signal.SIGUSR2)]
    with pytest.raises(SystemExit) as raised:
        run_small(tmp_path, OPTIONS, callback=send_signals_at(3, *signals))
    assert raised.value.code == code
    assert RunDirectory.open(tmp_path / "run").checkpoint_steps() == [2]
    assert [signal.getsignal(number) for number in (*ENDING, signal.SIGUSR2)] == before
    resume(tmp_path / "run")
    assert differences_beyond_saves(straight, tmp_path / "run") == []


def test_a_run_that_is_interrupted_many_times_ends_the_same(straight: Path, tmp_path: Path) -> None:
    run = run_small(tmp_path, OPTIONS, callback=send_signals_at(1, signal.SIGINT)).directory
    for step in (2, 3, 5, 6):
        assert resume(run, callback=send_signals_at(step, signal.SIGINT)).exit_code == 130
    resume(run)
    assert differences_beyond_saves(straight, run) == []


def test_a_run_directory_in_use_is_refused(straight: Path) -> None:
    with hold_lock(RunDirectory.open(straight)), pytest.raises(ValueError, match=rf"{straight}.*in use"):
        resume(straight)


def test_a_deleted_lock_file_admits_no_second_process(straight: Path) -> None:
    with hold_lock(RunDirectory.open(straight)):
        (straight / ".lock").unlink()
        with pytest.raises(ValueError, match=rf"{straight}.*in use"):
            resume(straight)


def test_a_leftover_lock_file_does_not_lock(tmp_path: Path) -> None:
    run = run_small(tmp_path, {"training.steps": 1, "evaluation.every_steps": 0}).directory
    (run / ".lock").write_text("99999999\n")
    assert resume(run, ["training.steps=2"]).exit_code == 0


# Signals to other processes


class Process:
    """`legato train` in a process, and what it has done so far."""

    def __init__(self, folder: Path, options: dict[str, Any], sleep: str) -> None:
        folder.mkdir()
        self.run, self.folder = folder / "run", folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LEGATO_TEST_SLEEP": sleep, "COLUMNS": "200"}
        self.output = (folder / "output").open("w")
        self.inner = subprocess.Popen(
            [sys.executable, "-m", "legato.cli.main", "train", *words(folder, options)],
            env=environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, text: str) -> None:
        """Until a line of the metrics holds this."""
        path = self.run / "metrics.jsonl"
        for _ in range(600):
            if path.exists() and text in path.read_text():
                return
            assert self.inner.poll() is None, self.printed
            time.sleep(0.05)
        raise AssertionError(f"{text} never came:\n{self.printed}")

    def end(self) -> int:
        return self.inner.wait(timeout=60)

    @property
    def printed(self) -> str:
        self.output.flush()
        return (self.folder / "output").read_text()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(sleep: str, **changes: Any) -> Process:
        started.append(Process(tmp_path / "place", {**OPTIONS, **changes}, sleep))
        return started[-1]

    yield start
    for each in started:
        if each.inner.poll() is None:
            each.inner.kill()
            each.inner.wait()
        each.output.close()


def test_an_interrupted_process_prints_the_command_that_resumes(process: Callable[..., Process], straight: Path) -> None:
    this = process("0.01")
    this.wait_for('"kind":"step","step":3')
    this.inner.send_signal(signal.SIGINT)
    assert this.end() == 130
    assert any(line.startswith("SIGINT") for line in this.printed.splitlines())
    assert f"legato resume {this.run}" in this.printed
    assert "Traceback" not in this.printed
    resume(this.run)
    assert differences_beyond_saves(straight, this.run) == []


@pytest.mark.parametrize(
    "changes", [pytest.param({"policy.lora.rank": 2}, id="lora"), pytest.param({}, id="all weights", marks=pytest.mark.slow)]
)
def test_a_running_process_holds_the_lock_and_a_killed_one_resumes_to_the_same_bits(
    changes: dict[str, Any], process: Callable[..., Process], tmp_path: Path
) -> None:
    straight = run_small(tmp_path / "straight", {**OPTIONS, **changes}).directory
    this = process("0.1", **changes)
    this.wait_for('"kind":"checkpoint","step":2')
    with pytest.raises(ValueError, match=rf"{this.run}.*in use"):
        resume(this.run)
    this.wait_for('"kind":"step","step":3')
    this.inner.kill()
    assert this.end() == -signal.SIGKILL
    assert RunDirectory.open(this.run).checkpoint_steps() in ([2], [2, 4])
    resume(this.run)
    assert differences_beyond_saves(straight, this.run) == []


def test_a_process_that_gets_a_second_signal_does_not_finish_its_step(process: Callable[..., Process]) -> None:
    """A step takes five seconds here: 16 rewards of 0.3 seconds."""
    this = process("0.3")
    this.wait_for('"kind":"evaluation","step":0')
    time.sleep(0.5)
    this.inner.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    this.inner.send_signal(signal.SIGTERM)
    assert this.end() == 143
    assert "Traceback" not in this.printed
    assert RunDirectory.open(this.run).checkpoint_steps() == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_process_interrupted_during_warm_up_prints_the_command_that_begins_again(
    number: signal.Signals, code: int, process: Callable[..., Process]
) -> None:
    """There is no state to save yet: the process ends at once, and a resume is refused."""
    this = process("0", **{"policy.warm_up.steps": 100000, "policy.warm_up.examples_per_step": 4})
    this.wait_for('"kind":"warm-up"')
    this.inner.send_signal(number)
    assert this.end() == code
    again, last = f"legato train {this.run}/config.toml output.name=run-2", this.printed.splitlines()[-1]
    assert number.name in last and "warm-up" in last and last.endswith(again)
    assert "Traceback" not in this.printed and "legato resume" not in this.printed
    assert number.name in RunDirectory.open(this.run).metrics()[-1]["reason"]
    with pytest.raises(ValueError, match=r"no whole checkpoint.*" + re.escape(again)):
        resume(this.run)


@pytest.mark.parametrize("named", [True, False])
def test_the_printed_command_begins_the_run_again(named: bool, tmp_path: Path) -> None:
    sent: list[None] = []

    class Impatient(Listener):
        def warm_up(self, step: int, steps: int, loss: float) -> None:
            if not sent:
                sent.append(os.kill(os.getpid(), signal.SIGTERM))

    options = {**OPTIONS, "policy.warm_up.steps": 2, "training.steps": 1}
    arguments = [word for word in words(tmp_path, options) if named or not word.startswith("output.name=")]
    before = signal.getsignal(signal.SIGTERM)
    run = start(load([], arguments), wire.PythonObjects(), Impatient())
    assert (run.exit_code, run.model_folder) == (143, None) and signal.getsignal(signal.SIGTERM) == before
    again = run.reason.partition("begin again with legato train ")[2].split()
    assert len(again) == 1 + named
    other = start(load([Path(again[0])], again[1:]), wire.PythonObjects(), Listener())
    assert other.exit_code == 0 and other.directory != run.directory


def test_a_run_from_python_without_a_checkpoint_is_begun_again_from_python(tmp_path: Path) -> None:
    class Impatient(Listener):
        def warm_up(self, step: int, steps: int, loss: float) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    options = {path: value for path, value in OPTIONS.items() if path != "reward.kind"}
    run = run_small(tmp_path, {**options, "policy.warm_up.steps": 2}, reward=verdicts.slow, watcher=Impatient())
    assert run.exit_code == 130 and "from Python" in run.reason and "legato train" not in run.reason
    with pytest.raises(ValueError, match=r"from Python.*reward"):
        resume(run.directory)


def test_a_keyboard_interrupt_without_a_signal_is_raised(tmp_path: Path) -> None:
    class Impatient(Listener):
        def warm_up(self, step: int, steps: int, loss: float) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_small(tmp_path, {**OPTIONS, "policy.warm_up.steps": 2}, watcher=Impatient())
