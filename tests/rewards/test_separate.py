"""Rewards in a process of their own."""

import json
import os
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from legato.config.load import load
from legato.core.rollout import Problem, Rollout, Unscorable
from legato.errors import InputError
from legato.rewards import separate_worker
from legato.rewards.scoring import judge_all
from legato.rewards.separate import SeparateReward, check_separate, rollout_as_json, rollout_from_json
from legato.rewards.trl import Schedule
from legato.run.wire import PythonObjects, reward_of
from legato.workers.pool import Workers
from tests.proof.responses import response

HOSTILE = """
import ctypes, os
from legato.rewards.scoring import batched

def score(rollout, factor=1.0):
    if rollout.text == "hang":
        ctypes.PyDLL(None).poll(None, 0, 60000)     # holds the lock of the interpreter for a minute
    if rollout.text == "leave":
        os._exit(3)
    return {"process": os.getpid(), "tokens": factor * float(rollout.tokens.sum())}

@batched
def rank(rollouts):
    return [rollout.rollout_id for rollout in rollouts]
"""


def make_rollout(text: str) -> Rollout:
    problem = Problem(prompt=[{"role": "user", "content": "é"}], answer="42", fields={"numbers": [1, 2]})
    return replace(response(problem, text, 3), tokens=torch.tensor([1, 2, 3]), sampler_logprobs=torch.randn(3))


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)
    return str(file)


def test_a_rollout_goes_through_json_unchanged() -> None:
    several = replace(make_rollout("x"), dialogue=("a", "b"), turn_rewards=(0.1, 1.0), kept_logmass=torch.zeros(3))
    for rollout in (make_rollout("x"), several):
        back = rollout_from_json(json.loads(json.dumps(rollout_as_json(rollout))))
        for field in fields(Rollout):
            one, other = getattr(rollout, field.name), getattr(back, field.name)
            assert torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, torch.Tensor) else one == other


def test_the_worker_calls_the_reward_at_its_path(path: str) -> None:
    records = [rollout_as_json(make_rollout("x"))] * 2
    assert separate_worker.judge(f"{path}:rank", {}, records, Schedule()) == [{"": 0.0}] * 2
    scores = separate_worker.judge(f"{path}:score", {"factor": 2}, records, Schedule())
    assert scores[0] == {"process": os.getpid(), "tokens": 12.0}


def test_the_trainer_does_not_import_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "once.py"
    file.write_text("raise RuntimeError('imported')\n")
    code = {"reference": f"{file}:score", "file": str(file), "sha256": "0" * 64}
    replies = {"batch": True, "code": [code]}
    monkeypatch.setattr(Workers, "ask", lambda self, *question, seconds: replies)
    config = load([], (), {"reward.kind": f"{file}:score", "reward.separate_process": True}).config
    [component] = reward_of(config, PythonObjects()).components.values()
    assert component.reward.batch and [each.file for each in component.reward.code] == [str(file)]
    replies = {"refused": "expected one positional argument"}
    with pytest.raises(InputError, match="expected one positional argument"):
        reward_of(config, PythonObjects())


def test_the_worker_describes_a_reward(path: str) -> None:
    Path(path).with_name("helper_of_hostile.py").write_text("")
    Path(path).write_text("import helper_of_hostile\n" + HOSTILE)
    facts = separate_worker.answer("describe", f"{path}:rank", {}, [], {})
    assert facts["batch"] and [each["reference"] for each in facts["code"]] == [f"{path}:rank", "helper_of_hostile"]
    assert separate_worker.answer("describe", f"{path}:score", {}, [], {})["batch"] is False
    assert "has no 'absent'" in separate_worker.answer("describe", f"{path}:absent", {}, [], {})["refused"]


def test_a_reward_that_no_other_process_can_import_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected a reward named as .* got none"):
        check_separate([])


@pytest.mark.slow
def test_a_reward_that_holds_the_interpreter_or_ends_its_process_costs_its_rollout_only(path: str) -> None:
    reward = SeparateReward(path=f"{path}:score", options={}, seconds=5.0, batch=False)
    start = time.monotonic()
    verdicts = judge_all(reward, [make_rollout(text) for text in ("a", "hang", "b", "leave")])
    assert time.monotonic() - start < 55
    assert verdicts[0]["tokens"] == verdicts[2]["tokens"] == 6.0
    assert len({verdicts[0]["process"], verdicts[2]["process"], os.getpid()}) == 3
    assert verdicts[1] == Unscorable("timed out after 5 s")
    assert "exit status 3" in verdicts[3].reason
