"""Contracts that anyone can run on code of their own:

    python -m pytest tests/contracts --environment my_env.py:MyEnv --reward my_reward.py:score --problems my_problems.jsonl
    python -m pytest tests/contracts --part my_clip.py:MyClip
    python -m pytest tests/contracts --engine my_engine.py:MyEngine

Without these options the contracts are run on ours.
"""

import pytest

from legato.core.rollout import Problem
from legato.tasks.data import Jsonl

OWN_PROBLEMS = [
    Problem(prompt="2+3=", answer="5"),
    Problem(prompt=[{"role": "user", "content": "Reverse abc."}], answer="cba"),
    Problem(prompt="3 5 2 -> 13=", answer="3*5-2", fields={"numbers": [3, 5, 2], "target": 13}),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--environment", metavar="FILE.py:NAME", help="run the contract of environments on this one")
    parser.addoption("--reward", metavar="FILE.py:NAME", help="run the contract of rewards on this one")
    parser.addoption("--part", metavar="FILE.py:NAME", help="run the contract of parts on this one")
    parser.addoption(
        "--detaches", action="store_true", help="the part stops gradients on purpose: its gradient is no derivative"
    )
    parser.addoption("--engine", metavar="FILE.py:NAME", help="run the contract of engines on this one")
    parser.addoption("--problems", metavar="FILE.jsonl", help="problems for --environment and --reward")


def choose_names(config: pytest.Config, option: str, ours: list[str]) -> list[str]:
    """The names in an option, or `ours` without it. The options exist only if this folder is on the command line."""
    named = config.getoption(option, None)
    return ours if named is None else [named]


@pytest.fixture(scope="session")
def problems(request: pytest.FixtureRequest) -> list[Problem]:
    """At least two different problems."""
    file = request.config.getoption("--problems", None)
    return OWN_PROBLEMS if file is None else list(Jsonl(path=file).load())[:8]
