"""Environments that were written for others: classes of TRL's `environment_factory`, and agents that own their loop."""

import inspect
from typing import Any

from legato.environments.agents import FunctionAgent
from legato.environments.trl import TrlEnvironment, is_trl_environment


def adapt_environment(thing: Any) -> Any:
    """The environment or agent that an object, a function or a factory stands for; one of ours unchanged.

    An instance comes from a class that the configuration names: then its class is the factory.
    """
    if callable(getattr(thing, "episode", None)) or is_agent(thing):
        return thing
    if is_trl_environment(type(thing)):
        return TrlEnvironment(type(thing), first=thing)
    # A function, or a function with its options.
    return FunctionAgent(thing) if inspect.isroutine(getattr(thing, "func", thing)) else thing


def is_agent(thing: Any) -> bool:
    """Whether an object plays episodes by itself (`agents.py`)."""
    return callable(getattr(thing, "attempt", None))
