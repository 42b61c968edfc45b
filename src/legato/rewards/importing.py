"""Rewards of the user's: "module:name" or "file.py:name" in place of the name of one of ours."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from legato.core.importing import import_object
from legato.errors import InputError
from legato.rewards.scoring import Reward


def import_reward(path: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward at a path. Of a class an instance is made, with the options."""
    found = import_object("reward", path, options)
    if not callable(found):
        raise InputError(f"reward {path!r}: is a {type(found).__name__}; a function of one rollout is needed")
    _check_signature(found, path)
    return found  # type: ignore[no-any-return]


def _check_signature(reward: Callable[..., Any], path: str) -> None:
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):
        # Some builtins have none; calling it will tell.
        return
    try:
        signature.bind(object())
    except TypeError:
        raise InputError(f"reward {path!r}: takes {signature}; one positional argument, the rollout, is needed") from None
