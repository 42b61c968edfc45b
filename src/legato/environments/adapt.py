"""Environments that were written for others: classes of TRL's `environment_factory`, and environments of verifiers."""

from typing import Any

from legato.environments.trl import TrlEnvironment, is_trl_environment


def adapt_environment(thing: Any) -> Any:
    """The environment that an object or a factory stands for; an environment of ours unchanged.

    An instance comes from a class that the configuration names: then its class is the factory.
    """
    if callable(getattr(thing, "episode", None)):
        return thing
    if is_trl_environment(type(thing)):
        return TrlEnvironment(type(thing), first=thing)
    return thing
