"""Runs whose rewards never score, exit, hang, fork or meddle: an error that says so, or a run that nothing happened to."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.core import user_code
from legato.core.rollout import Problem, Rollout
from legato.errors import InputError
from legato.records.directory import RunDirectory
from legato.run import wire
from legato.run.evaluate import evaluate
from legato.run.target import find
from legato.run.train import resume
from tests.proof.runs import Listener, differences, outcome, run_small, steps
from tests.proof.verdicts import odd

pytestmark = pytest.mark.usefixtures("lightly")
ONE = {"training.steps": 1, "evaluation.every_steps": 0}


def always(verdict: Any) -> Any:
    def reward(rollout: Rollout) -> Any:
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict

    return reward


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (None, "returned None"),
        (float("nan"), "returned nan"),
        (10**400, "returned 1000"),
        (SystemExit(0), "SystemExit: 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (BaseException("odd"), "BaseException: odd"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_run_whose_first_step_scores_nothing_ends_with_an_error(verdict: Any, words: str, tmp_path: Path) -> None:
    listener = Listener()
    with pytest.raises(InputError, match=rf"no score for any of the first 16: reward: {words}.* \(16 rollouts\)"):
        run_small(tmp_path, {"training.steps": 3}, reward=always(verdict), watcher=listener)
    end = RunDirectory.open(tmp_path / "run").metrics()[-1]
    assert (end["kind"], end["step"]) == ("end", 0) and words in end["reason"]
    # The evaluation before the first step says it too.
    assert words in listener.said


@pytest.mark.parametrize("kind", [bool, torch.tensor])
def test_a_reward_of_bools_or_scalar_tensors_trains_as_one_of_floats(kind: Any, tmp_path: Path) -> None:
    def reward(rollout: Rollout) -> Any:
        return kind(odd(rollout))

    straight = run_small(tmp_path / "a", ONE, reward=always_odd).directory
    other = run_small(tmp_path / "b", ONE, reward=reward).directory
    assert outcome(straight)["model/model.safetensors"] == outcome(other)["model/model.safetensors"]
    assert steps(other)[0]["rollouts/unscorable"] == 0


def always_odd(rollout: Rollout) -> float:
    return odd(rollout)


def test_a_reward_that_meddles_with_tensors_settings_and_processes_changes_nothing(tmp_path: Path) -> None:
    def reward(rollout: Rollout) -> float:
        value = odd(rollout)
        rollout.tokens.zero_()
        rollout.mask.zero_()
        rollout.sampler_logprobs.fill_(-9.0)
        torch.set_grad_enabled(False)
        if rollout.rollout_id == 0:
            os.fork()
        return value

    reward.__name__ = "always_odd"
    straight = run_small(tmp_path / "a", {"training.steps": 2}, reward=always_odd).directory
    other = run_small(tmp_path / "b", {"training.steps": 2}, reward=reward).directory
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert [name for name in differences(outcome(straight), outcome(other)) if "config" not in name] == []


def test_an_evaluation_that_scores_nothing_is_an_error(tmp_path: Path) -> None:
    run = run_small(tmp_path, {**ONE, "reward.kind": f"{__file__}:always_odd"}).directory
    target = find(str(run), ["reward.kind=format", "reward.pattern=(?s).*"])
    assert evaluate(target, samples=1).unscorable == 0
    with pytest.raises(InputError, match="no score for any of"):
        evaluate(find(str(run), [f"reward.kind={__file__}:exits"]), samples=1)


def exits(rollout: Rollout) -> float:
    raise SystemExit(0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(user_code, "GRACE_SECONDS", 0.1)
    yield


@pytest.mark.parametrize("place", ["step", "evaluation"])
def test_a_signal_saves_and_ends_although_the_reward_hangs(place: str, tmp_path: Path, impatient: None) -> None:
    hangs = [True]

    def reward(rollout: Rollout) -> float:
        hang = rollout.rollout_id == 40 if place == "step" else -9 << 32 < rollout.rollout_id < -4 << 32
        if hang and hangs:
            hangs.clear()
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                time.sleep(60)
        return odd(rollout)

    options = {"training.steps": 4, "output.checkpoint_every_steps": 0, "task.resampling": "history"}
    run = run_small(tmp_path, options, reward=reward)
    assert (run.exit_code, run.reason) == (143, "stopped by SIGTERM; the state is saved")
    assert not hangs
    assert RunDirectory.open(run.directory).checkpoint_steps() == [2]
    assert resume(run.directory, objects=wire.PythonObjects(reward=reward)).exit_code == 0
    straight = run_small(tmp_path / "straight", options, reward=reward).directory
    one, other = outcome(straight, checkpoints=False), outcome(run.directory, checkpoints=False)
    assert one["model/model.safetensors"] == other["model/model.safetensors"]
    if place == "step":
        assert differences(one, other) == []


def test_a_process_that_a_reward_forks_and_ends_does_not_end_the_run(tmp_path: Path, impatient: None) -> None:
    """A forked child shares the pipe in which Python notes signals: its SIGTERM must not pass for ours."""

    def reward(rollout: Rollout) -> float:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child survived its signal"
        time.sleep(0.02)
        return odd(rollout)

    run = run_small(tmp_path, {"training.steps": 2, "evaluation.every_steps": 0}, reward=reward)
    assert (run.exit_code, run.reason) == (0, "all steps done")


def test_a_callback_that_exits_is_an_error_and_the_run_is_saved(tmp_path: Path) -> None:
    def leave(report: Any) -> None:
        if report.step == 2:
            raise SystemExit(0)

    with pytest.raises(InputError, match=r"sys\.exit\(0\)"):
        run_small(tmp_path, {"output.checkpoint_every_steps": 0}, callback=leave)
    assert RunDirectory.open(tmp_path / "run").checkpoint_steps()


class Sums:
    """A task that exits once it is told to."""

    exits = False

    def problem(self, random: random.Random) -> Problem:
        if self.exits:
            raise SystemExit(0)
        left = random.randrange(100)
        return Problem(prompt=f"{left}+1=", answer=str(left + 1))


def test_a_task_that_exits_in_the_middle_of_a_run_leaves_a_checkpoint(tmp_path: Path) -> None:
    task = Sums()

    def stop(report: Any) -> None:
        task.exits = True

    with pytest.raises(InputError, match=r"got SystemExit: 0 \(problem\(random\) of problems\)"):
        run_small(tmp_path, {**ONE, "training.steps": 2}, problems=task, reward=odd, callback=stop)
    task.exits = False
    assert resume(tmp_path / "run", objects=wire.PythonObjects(problems=task, reward=odd)).exit_code == 0
