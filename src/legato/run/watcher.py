"""The interface that shows the progress of a run: on a terminal, in a notebook, or not at all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplaySettings:
    """What a display needs to know of a run."""

    log_every_steps: int
    """Without a terminal, a line every so many steps; 0: by time alone."""
    log_every_seconds: float
    """Without a terminal, a line every so many seconds; 0: by steps alone."""
    may_end_early: bool = True
    """Whether a target or the health watch may end the run before its last step."""


@runtime_checkable
class Watcher(Protocol):
    """Callbacks of a run; `display.py` has two implementations. Empty bodies let a subclass override only some."""

    def start(self, title: str, notes: Sequence[str]) -> None:
        return

    def warm_up(self, step: int, steps: int, loss: float) -> None:
        return

    def step(
        self,
        step: int,
        steps: int,
        metrics: Mapping[str, float],
        evaluation: Mapping[str, float] | None,
        seconds_left: float | None,
    ) -> None:
        return

    def message(self, text: str) -> None:
        return

    def close(self) -> None:
        return


@runtime_checkable
class Configurable(Protocol):
    """A watcher that wants to know the display settings of the run before it starts."""

    def configure(self, settings: DisplaySettings) -> None: ...


class Silent(Watcher):
    """Shows nothing."""


class Guard:
    """Runs actions that only show something, until one raises; later ones are skipped. Showing never ends a run."""

    def __init__(self) -> None:
        self.failure: str | None = None
        """Why nothing is shown any more; None while it is."""
        self._busy = False
        self._waiting: list[Callable[[], None]] = []

    def attempt(self, action: Callable[[], None]) -> None:
        """Run the action; one that a signal handler asks for in the middle of another runs after that one."""
        self._waiting.append(action)
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._run(self._waiting.pop(0))
        finally:
            self._busy = False

    def _run(self, action: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            action()
        except Exception as error:  # a log that is closed or full, a watcher of the user: neither is worth the run
            self.failure = f"{type(error).__name__}: {error}"

    @property
    def note(self) -> str | None:
        """A sentence for the records; None while everything is shown."""
        return None if self.failure is None else f"printing stopped and the run went on without it ({self.failure})"


class GuardedWatcher(Watcher):
    """Passes everything on to another watcher until that one raises."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self.guard = watcher, Guard()

    def configure(self, settings: DisplaySettings) -> None:
        watcher = self._watcher
        if isinstance(watcher, Configurable):
            self.guard.attempt(lambda: watcher.configure(settings))

    def start(self, title: str, notes: Sequence[str]) -> None:
        self.guard.attempt(lambda: self._watcher.start(title, notes))

    def warm_up(self, step: int, steps: int, loss: float) -> None:
        self.guard.attempt(lambda: self._watcher.warm_up(step, steps, loss))

    def step(
        self,
        step: int,
        steps: int,
        metrics: Mapping[str, float],
        evaluation: Mapping[str, float] | None,
        seconds_left: float | None,
    ) -> None:
        self.guard.attempt(lambda: self._watcher.step(step, steps, metrics, evaluation, seconds_left))

    def message(self, text: str) -> None:
        self.guard.attempt(lambda: self._watcher.message(text))

    def close(self) -> None:
        """Close the other watcher even if it has raised: a live panel must give the terminal back."""
        if self.guard.failure is None:
            self.guard.attempt(self._watcher.close)
        else:
            with suppress(Exception):
                self._watcher.close()


def lost_output(stream: object) -> OSError | None:
    """Why a stream of the command line takes no more text (`cli/output.py`); None while it does."""
    error: OSError | None = getattr(stream, "lost", None)
    return error
