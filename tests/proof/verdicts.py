"""Rewards that a run names by path: decided by the tokens alone, so that an untrained model gets some of both."""

import os
import time
from typing import Any

import numpy
import torch

from legato.core.rollout import TurnScores


def odd(rollout: Any) -> float:
    """One half of all responses are right, whatever the policy knows."""
    return float(int(rollout.tokens.sum()) % 2)


def early(rollout: Any) -> float:
    """Tokens of the first half of the vocabulary are good: something to learn in a few updates."""
    return float((rollout.tokens < 40).float().mean())


def lengths_of_steps(rollout: Any) -> Any:
    """A number for each step of a response."""
    return TurnScores([float((rollout.turn == step).sum()) for step in range(int(rollout.turn.max()) + 1)])


def dice(rollout: Any) -> float:
    """A reward that draws from global generators: only a run that restores them repeats it."""
    return float(odd(rollout) + numpy.random.random() + torch.rand(()).item())


def slow(rollout: Any) -> float:
    """Makes a step last long enough for a signal to come in the middle of it."""
    time.sleep(float(os.environ.get("LEGATO_TEST_SLEEP", "0.02")))
    return odd(rollout)


def fatal(rollout: Any) -> float:
    """Ends the whole process after an evaluation of 4 problems, sampled and greedy, and a step of 16 rollouts."""
    global calls
    calls += 1
    if calls > 4 + 4 + 16:
        print("legato: out of memory, says the machine", flush=True)
        os._exit(7)
    return odd(rollout)


calls = 0
NOT_CALLABLE = 3
