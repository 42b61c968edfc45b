"""What a run does while its disk is full: it says so, waits, and tries again until there is room or a signal comes."""

import time
from collections.abc import Callable

from legato.records.room import DiskFullError

_RETRY_SECONDS = 5.0
_POLL_SECONDS = 0.2
_REPEAT_SECONDS = 600.0
"""How often the status line is repeated."""


class Pause:
    """A waiter (`records/room.py`) of a run. `interrupted` tells whether a signal asks the run to end."""

    def __init__(self, say: Callable[[str], None], interrupted: Callable[[], bool]) -> None:
        self._say, self._interrupted = say, interrupted
        self._since: float | None = None
        self._said_at: float | None = None

    def wait(self, error: DiskFullError) -> None:
        """Wait until the next attempt. Raises `error` if the run is asked to end."""
        if self._interrupted():
            raise error
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if self._said_at is None or now - self._said_at > _REPEAT_SECONDS:
            self._said_at = now
            self._say(f"paused: {error}; the run goes on by itself when there is room, SIGINT ends it")
        while not self._interrupted():
            if time.monotonic() >= now + _RETRY_SECONDS:
                return
            time.sleep(_POLL_SECONDS)
        raise error

    def succeed(self) -> None:
        """Say that the run goes on."""
        assert self._since is not None
        self._say(f"there is room again after {time.monotonic() - self._since:.0f} s; going on")
        self._since = self._said_at = None
