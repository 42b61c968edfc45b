"""SIGINT and SIGTERM: the first signal ends the run after the current step and a checkpoint; the second stops at once.

Before the first step there is no state to save, so the first signal already stops at once. A reward that does not return
after the first signal is given up together with its step (`core/user_code.py`).
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from legato.core.user_code import RUN, StoppedAtOnce
from legato.core.world import World


class Interrupt:
    """A context that records signals instead of raising. Outside the main thread it does nothing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        RUN.asked_to_end = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        RUN.asked_to_end = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise StoppedAtOnce(128 + number)
        self.received = signal.Signals(number)
        RUN.ask_to_end(number)
        self._say(f"{self.received.name}: finishing this step, then saving; once more stops at once without saving")

    def reached_any(self, world: World) -> bool:
        """Whether a signal reached any rank: all of them end after the same step, as if each had received it."""
        number = world.agree(0 if self.received is None else int(self.received))
        if number and self.received is None:
            self.received = signal.Signals(number)
        return number != 0

    @property
    def exit_code(self) -> int:
        return 0 if self.received is None else 128 + int(self.received)


class ImmediateInterrupt(Interrupt):
    """A context in which a signal raises KeyboardInterrupt. `received` is the signal, or None."""

    def __init__(self) -> None:
        super().__init__(lambda text: None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        raise KeyboardInterrupt
