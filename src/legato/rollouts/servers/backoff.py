"""How long to wait before a server is asked again: the same for a run, for `--server` and for the probe."""

import time
from collections.abc import Callable
from typing import TypeVar

from legato.rollouts.servers.errors import BusyError, ServerError

_Answer = TypeVar("_Answer")

FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
"""Seconds; doubled each time. A server that is busy may ask for more."""
JITTER = (0.5, 1.5)
"""Bounds of the factor that keeps requests which failed together from being sent again together."""


def seconds_to_wait(error: ServerError, times: int) -> float:
    """Seconds before a request is sent again after an error, the `times`-th in a row; without jitter."""
    asked = error.seconds if isinstance(error, BusyError) else 0.0
    return max(asked, min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(times - 1, 20)))


def ask_until_taken(ask: Callable[[], _Answer], seconds: float, pause: Callable[[float], object] = time.sleep) -> _Answer:
    """The answer of a server. While it is busy it is asked again; BusyError once the waits add up to more than `seconds`."""
    times, waited = 0, 0.0
    while True:
        try:
            return ask()
        except BusyError as error:
            times += 1
            wait = seconds_to_wait(error, times)
            waited += wait
            if waited > seconds:
                raise
        pause(wait)
