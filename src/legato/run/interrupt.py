"""Signals: SIGHUP, SIGINT, SIGTERM and SIGUSR1 end the run after the current step and a checkpoint; SIGUSR2 only saves.

A second SIGINT or SIGTERM stops at once. A terminal that closes sends SIGHUP more than once, and batch systems send SIGTERM
some time after SIGUSR1: neither stops a run that is about to save. Before the first step there is no state to save, so the
first signal already stops at once. A reward that does not return
after the first signal is given up together with its step (`core/user_code.py`).
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from legato.core.user_code import RUN, StoppedAtOnce
from legato.core.world import OneProcess, World
from legato.training.ranks.join import is_echo

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a run with its state saved and exit code 128 + number."""
_URGENT = (signal.SIGINT, signal.SIGTERM)
"""Signals of which a second one stops at once."""


class Interrupt:
    """A context that records signals instead of raising. Outside the main thread it does nothing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self._say = say
        self._received_at = 0.0
        self._save_requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        RUN.asked_to_end = None
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                # `nohup` ignores SIGHUP so that a run outlives its terminal.
                if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
            self._before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._note_save_request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        RUN.asked_to_end = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        urgent = number in _URGENT
        if urgent and self.received in _URGENT:
            if is_echo(time.monotonic() - self._received_at):
                return
            raise StoppedAtOnce(128 + number)
        if self.received is not None and not urgent:
            return
        self.received, self._received_at = signal.Signals(number), time.monotonic()
        RUN.ask_to_end(number)
        again = "once more" if urgent else "SIGINT twice"
        self._say(f"{self.received.name}: finishing this step, then saving; {again} stops at once without saving")

    def _note_save_request(self, number: int, frame: FrameType | None) -> None:
        self._save_requested = True
        self._say("SIGUSR2: finishing this step, then saving and going on")

    def take_over(self, number: int | None) -> None:
        """Note a signal that another rank has received; None changes nothing."""
        if number is not None and self.received is None:
            self.received = signal.Signals(number)

    def reached_any(self, world: World) -> bool:
        """Whether a signal reached any rank: all of them end after the same step, as if each had received it."""
        number = world.agree(0 if self.received is None else int(self.received))
        self.take_over(number or None)
        return number != 0

    def take_save_request(self, world: World | None = None) -> bool:
        """Whether SIGUSR2 reached any rank since this was last asked."""
        requested, self._save_requested = self._save_requested, False
        return bool((world or OneProcess()).agree(int(requested)))

    @property
    def exit_code(self) -> int:
        return 0 if self.received is None else 128 + int(self.received)


class ImmediateInterrupt(Interrupt):
    """A context in which a signal raises KeyboardInterrupt. `received` is the signal, or None."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and is_echo(time.monotonic() - self._received_at):
            return
        self.received, self._received_at = signal.Signals(number), time.monotonic()
        # The other ranks are told which signal it was.
        interruption = KeyboardInterrupt()
        interruption.signal = self.received  # type: ignore[attr-defined]
        raise interruption

    def _note_save_request(self, number: int, frame: FrameType | None) -> None:
        self._say("SIGUSR2: there is no state to save before the first step")
