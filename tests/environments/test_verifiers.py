"""The adapter to verifiers without the package: what it says, and how it reads problems and episodes.

tests/serve/test_foreign.py runs it with the real package.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from legato.config.kinds import make
from legato.core.rollout import Problem
from legato.environments import verifiers as adapter
from legato.environments.adapt import is_agent
from legato.errors import InputError
from legato.tasks import verifiers as tasks

NAME = tasks.TasksetName("words", (("size", 3), ("names", ("a", "b"))), 10)


def task(number: int, **data: Any) -> Any:
    return SimpleNamespace(data=SimpleNamespace(**{"idx": number, "prompt": None, **data}))


def test_without_the_package_the_message_names_the_extra() -> None:
    with pytest.raises(InputError, match=r"pip install 'legato\[verifiers\]'"):
        make("task", "verifiers", {"taskset": "reverse-text"}).load()


def test_tasks_become_problems_that_name_them() -> None:
    plain = tasks.problem_of(task(2, prompt="say a", answer=4), NAME)
    assert (plain.prompt, plain.answer) == ("say a", "4")
    assert adapter.task_name(plain) == (NAME, 2) and hash(adapter.task_name(plain))
    with_system = tasks.problem_of(task(0, prompt="say a", system_prompt="Be brief."), NAME)
    assert with_system.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "say a"}]
    chat = tasks.problem_of(task(1, prompt=[{"role": "user", "content": "hello"}]), NAME)
    assert chat.prompt == [{"role": "user", "content": "hello"}]
    # Tasks that open the conversation themselves are still different problems.
    assert len({tasks.problem_of(task(number), NAME).key for number in range(3)}) == 3
    assert tasks.thaw(NAME.options) == {"size": 3, "names": ["a", "b"]}


def episode(*rewards: float, errors: Any = (), ok: bool = True) -> Any:
    traces = [SimpleNamespace(reward=reward, errors=[]) for reward in rewards]
    return SimpleNamespace(ok=ok, errors=list(errors), traces=traces)


def test_the_reward_is_that_of_the_one_trace() -> None:
    assert adapter.read_reward(episode(0.75)) == 0.75
    with pytest.raises(RuntimeError, match="expected an environment of one agent, got 2 traces"):
        adapter.read_reward(episode(0.5, 0.5))
    failed = SimpleNamespace(type="EnvError", message="no tool")
    with pytest.raises(RuntimeError, match="the episode failed in verifiers: EnvError: no tool"):
        adapter.read_reward(episode(1.0, errors=[failed], ok=False))


def test_it_is_an_agent_and_refuses_problems_of_other_tasks() -> None:
    environment = make("environment", "verifiers", {"harness": "null"})
    assert is_agent(environment)
    with pytest.raises(InputError, match=r"expected a problem of task\.kind = 'verifiers'"):
        adapter.task_name(Problem(prompt="1+1=", answer="2"))
