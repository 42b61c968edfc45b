"""A configuration that runs in seconds, and a run of it."""

from pathlib import Path

import pytest

from legato.config.load import load
from legato.lab.recorder import DEFAULT
from legato.run.train import start
from legato.run.watcher import Silent
from legato.run.wire import PythonObjects

SMALL = [
    *("policy.tiny.hidden=32", "policy.tiny.heads=2", "policy.warm_up.steps=30", "policy.warm_up.examples_per_step=32"),
    *(
        "task.most=6",
        "task.held_out=4",
        "training.prompts_per_step=8",
        "training.lr=1e-3",
        "rollouts.max_response_tokens=24",
    ),
    *("evaluation.every_steps=0", "reward.kind=format", 'reward.pattern="[12].*"'),
]
"""A reward that a barely trained policy gets now and then: the measurements need advantages, not skill."""


@pytest.fixture(scope="session")
def small() -> list[str]:
    return SMALL


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with all rollouts and its first and last checkpoint."""
    folder = tmp_path_factory.mktemp("lab")
    words = [*SMALL, "training.steps=4", "output.rollouts_every_steps=1", f"output.directory={folder}", "output.name=run"]
    return start(load([DEFAULT], words), PythonObjects(), Silent()).directory
