"""Calls of the user's code (rewards, environments, files at their import) that hang, exit, fork or raise anything.

    with UserCode("reward mine", seconds=600) as code:
        verdict = code.call(reward, rollout)        CallFailedError says what went wrong; the run goes on

- A call that takes longer than `seconds` is interrupted: an exception is raised inside it, in loops of Python as well as in
  calls of the system that wait. The exception is raised again every second until the call ends.
- `SystemExit`, `KeyboardInterrupt` and every other exception of the code are faults of the code. A signal that a person or
  a scheduler sent is none: the exceptions of signal handlers pass through.
- After a signal that asks the run to end, a call may go on for GRACE_SECONDS. Then `StopRequestedError` leaves the call, so
  that the run can save its last complete step.
- A call that cannot be interrupted (a C function that waits and does not return) is left behind: another thread saves the
  run and ends the process.
- C code that holds the interpreter's lock stops that thread too. Where the code looks for signals (`re`, arithmetic of long
  numbers), a timer of the system reaches it: the handler of `_TICK` checks the time as the thread would. Other code cannot
  be interrupted, and nothing can be saved meanwhile: the guardian ends the process (`guardian.py`). Such code belongs into a
  process of its own (`reward.separate_process`).
- A child that the code forked and that returns here would be a second trainer: the child ends.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from legato.core.guardian import Guardian
from legato.errors import describe_error

DEFAULT_SECONDS = 600.0
"""How long a call may take where no option says otherwise."""
GRACE_SECONDS = 10.0
"""How long a call may go on after a signal. Schedulers kill 30 s after their first signal; the rest is for the save."""
_POLL_SECONDS = 0.05
_AGAIN_SECONDS = 1.0
"""The time between two interruptions of a call that goes on regardless."""
_RESCUE_SECONDS = 5.0
"""How long a call may ignore interruptions before the run is saved without it."""
_NOTICE_SECONDS = 60.0
_WAKE = signal.SIGURG
"""Ignored by default and hardly ever used, which is why the runtime of Go interrupts its threads with it too."""
_TICK = signal.SIGVTALRM
_TICK_SECONDS = 0.5
"""Time on the processor between two ticks. Code that holds the interpreter's lock for long computes."""
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})

_T = TypeVar("_T")


class CallFailedError(Exception):
    """The user's code raised, or took too long; the message says which."""


class OverdueError(BaseException):
    """Raised inside the user's code when its time is up. No Exception, so that `except Exception` does not stop it."""


class StopRequestedError(BaseException):
    """A signal asked the run to end, and the user's code did not return in time. The current step is given up."""

    def __init__(self) -> None:
        super().__init__()
        # The handler that notes the signal cannot run while the main thread is in C code; the watch thread sees it arrive.
        self.signal = RUN.asked_to_end or RUN.arrived or signal.SIGTERM


class StoppedAtOnce(SystemExit):
    """Raised by a signal handler of ours: the process ends without saving. The user's own SystemExit does not end a run."""


def _say_nothing(text: str) -> None:
    pass


@dataclass(slots=True)
class CurrentRun:
    """What calls of the user's code need to know of the run in this process."""

    asked_to_end: signal.Signals | None = None
    asked_at: float = 0.0
    arrived: signal.Signals | None = None
    """An ending signal that reached the process and whose handler has not run yet."""
    rescue: Callable[[str, int], None] | None = None
    """Saves the run in another thread and ends the process; gets the reason and the exit code."""
    say: Callable[[str], None] = _say_nothing
    guardian: Guardian | None = None
    """Ends the process if a call holds the interpreter's lock; None in runs without code of the user's."""
    own_parts: tuple[str, ...] = ()
    """The parts of the algorithm that are the user's, as messages name them."""

    def forget(self) -> None:
        """The run has ended."""
        self.asked_to_end, self.arrived, self.rescue, self.say = None, None, None, _say_nothing
        self.guardian, self.own_parts = None, ()

    def ask_to_end(self, number: int) -> None:
        """Note the signal that asks the run to end."""
        self.asked_to_end, self.asked_at = signal.Signals(number), time.monotonic()


RUN = CurrentRun()
"""The run of this process. `run` fills it."""


def is_own(thing: Any) -> bool:
    """Whether an object is the user's and none of Legato's: its calls need a guard."""
    return type(thing).__module__.partition(".")[0] != "legato"


class UserCode:
    """A context in which the user's code is called from this thread, under the eyes of another one."""

    def __init__(self, name: str, seconds: float | None = DEFAULT_SECONDS, option: str | None = None) -> None:
        self.name, self.seconds = name, seconds
        self._option = "" if option is None else f" ({option} = {seconds:g})" if seconds is not None else f" ({option})"
        self.slack = 0.0
        """Seconds beyond `seconds` before a call is interrupted, for code that watches its own time."""
        self._since: float | None = None
        """When the current call began; None between calls."""
        self._due: type[BaseException] | None = None
        self._interrupted = 0
        self._sent_at = 0.0
        self._noticed = False
        self._by_signal = False
        self._signal_at: float | None = None
        self._rescuing = False
        self._closed = threading.Event()
        self._handlers: dict[signal.Signals, Any] = {}
        self._ending = threading.Lock()
        """Held while a call is interrupted, and while its end is noted: no call is interrupted after its end."""
        self._timer_before: tuple[float, float] | None = None
        self._guardian: Guardian | None = None
        self._beat_at = 0.0

    def __enter__(self) -> "UserCode":
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._handlers[_WAKE] = signal.signal(_WAKE, self._raise_due)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._raise_interrupt)
            if not _WATCHED and RUN.guardian is not None and RUN.guardian.is_here():
                self._guardian = RUN.guardian
                self._arrivals, self._arrived = self._guardian.arrivals, self._guardian.arrived
                with contextlib.suppress(BlockingIOError):
                    os.read(self._arrivals, 4096)  # signals of earlier calls, which were handled
                self._beat()
            else:
                self._arrivals, self._arrived = os.pipe()
                os.set_blocking(self._arrivals, False)
                os.set_blocking(self._arrived, False)
            self._wakeup_before = signal.set_wakeup_fd(self._arrived, warn_on_full_buffer=False)
            self._nested = bool(_WATCHED)
            _WATCHED.add(self._process)
            if not callable(signal.getsignal(_TICK)) or self._nested:
                self._handlers[_TICK] = signal.signal(_TICK, self._tick)
                self._timer_before = signal.setitimer(signal.ITIMER_VIRTUAL, _TICK_SECONDS, _TICK_SECONDS)
        self._watch = threading.Thread(target=self._observe, name=f"watch over {self.name}", daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._watch.join()
        if self._in_main:
            if self._timer_before is not None:
                signal.setitimer(signal.ITIMER_VIRTUAL, *self._timer_before)
            if not self._nested:
                _WATCHED.discard(self._process)
            signal.set_wakeup_fd(self._wakeup_before)
            if self._guardian is not None:
                self._guardian.rest()
            else:
                os.close(self._arrivals)
                os.close(self._arrived)
            for number, handler in self._handlers.items():
                # A last tick may be on its way; by default it would end the process.
                default = number is _TICK and handler is signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if default else handler)

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """What the function returns; CallFailedError for whatever it raises and for a call that takes too long."""
        try:
            try:
                self.restart()
                return function(*arguments)
            finally:
                self._stop_clock()
        except BaseException as error:
            self._stop_clock()
            if self.is_signal(error):
                raise
            raise CallFailedError(self.reason(error)) from error
        finally:
            self._end_call()

    def _stop_clock(self) -> None:
        """Note that the call has ended. An interruption that has not been raised yet is raised here, or never."""
        if os.getpid() != self._process:
            return  # a child that the code forked: the thread that held the lock may not exist there
        while True:
            try:
                with self._ending:
                    self._since = None
                    if not self._in_main and self._interrupted:
                        _raise_in(self._thread, None)
                return
            except (OverdueError, StopRequestedError):
                continue  # raised too late to end the call: it has returned

    def restart(self) -> None:
        """Count the time of the call from now on."""
        if self._signal_at is not None and RUN.asked_to_end is None:
            # Handlers run before the next line of Python: this was the signal of a child, which shared the pipe at first.
            self._signal_at, RUN.arrived = None, None
        if RUN.asked_to_end is None:
            self._interrupted, self._due = 0, None
        self._noticed, self._since = False, time.monotonic()

    def hurry(self, seconds: float) -> None:
        """Leave the current call no more than this many seconds."""
        if self.seconds is not None:
            self._since = time.monotonic() - max(0.0, self.seconds + self.slack - seconds)

    def is_signal(self, error: BaseException) -> bool:
        """Whether an exception comes from a signal and not from the user's code."""
        ours = isinstance(error, StoppedAtOnce | StopRequestedError)
        return ours or (isinstance(error, KeyboardInterrupt) and self._by_signal)

    def reason(self, error: BaseException) -> str:
        """One line on what the user's code did wrong."""
        return self.overdue if isinstance(error, OverdueError) else describe_error(error)

    @property
    def overdue(self) -> str:
        """The reason of a call that took too long."""
        return "timed out" if self.seconds is None else f"timed out after {self.seconds:g} s"

    def _end_call(self) -> None:
        if os.getpid() != self._process:
            # A child that the code forked. It must not go on with the work of its parent.
            os._exit(0)
        while self._rescuing:
            # Another thread is saving the run and will end the process.
            time.sleep(1.0)

    def _raise_due(self, number: int, frame: FrameType | None) -> None:
        due, self._due = self._due, None
        if due is not None and self._since is not None:
            raise due

    def _raise_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._by_signal = True
        raise KeyboardInterrupt

    def _tick(self, number: int, frame: FrameType | None) -> None:
        """Check the time in the main thread: the watch thread may be waiting for the interpreter's lock."""
        since, now = self._since, time.monotonic()
        if since is None:
            return
        due = self._due_error(since, now)
        if due is not None and (not self._interrupted or now - self._sent_at >= _AGAIN_SECONDS):
            self._interrupted, self._sent_at = self._interrupted + 1, now
            raise due

    def _due_error(self, since: float, now: float) -> type[BaseException] | None:
        """The exception that should leave a call that began at `since`; None while it may go on."""
        signal_at = RUN.asked_at if RUN.asked_to_end is not None else self._signal_at
        if signal_at is not None and now - signal_at >= GRACE_SECONDS:
            return StopRequestedError
        if self.seconds is not None and now - since >= self.seconds + self.slack:
            return OverdueError
        return None

    def _beat(self) -> None:
        """Send the guardian a sign of life."""
        if self._guardian is None:
            return
        self._beat_at, grace = time.monotonic(), GRACE_SECONDS + _RESCUE_SECONDS
        longest = None if self.seconds is None else self.seconds + self.slack + grace
        if RUN.asked_to_end is not None:
            longest = grace
        self._guardian.expect(self.name, longest, grace)

    def _observe(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            self._read_arrivals()
            since, now = self._since, time.monotonic()
            if now - self._beat_at >= _AGAIN_SECONDS:
                self._beat()
            if since is None:
                continue
            due = self._due_error(since, now)
            if due is not None:
                self._interrupt(due, now)
            elif now - since >= _NOTICE_SECONDS and not self._noticed and (self._option or self.seconds is not None):
                self._noticed = True
                end = "" if self.seconds is None else f"; it is given up after {self.seconds:g} s"
                self._say(f"{self.name} has been running for {now - since:.0f} s{end}{self._option}")

    def _say(self, text: str) -> None:
        # A terminal that is held with Ctrl-S stops this thread, but not the call.
        if self._guardian is not None:
            self._guardian.rest()
        RUN.say(text)
        self._beat()

    def _read_arrivals(self) -> None:
        """Note signals whose Python handlers cannot run because the main thread is in C code."""
        if not self._in_main:
            return
        try:
            numbers = os.read(self._arrivals, 4096)
        except BlockingIOError:
            return
        if self._wakeup_before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._wakeup_before, numbers)
        ending = [number for number in numbers if number in _ENDING and callable(signal.getsignal(number))]
        if ending and self._signal_at is None and RUN.rescue is not None:
            self._signal_at, RUN.arrived = time.monotonic(), signal.Signals(ending[0])

    def _interrupt(self, error: type[BaseException], now: float) -> None:
        """Raise an exception inside the call; if calls of this have no effect, save the run without it."""
        if self._interrupted and now - self._sent_at < _AGAIN_SECONDS:
            return
        if RUN.rescue is not None and self._interrupted * _AGAIN_SECONDS >= _RESCUE_SECONDS:
            self._rescue(error)
        with self._ending:
            if self._since is None:
                return  # the call has ended
            self._interrupted, self._sent_at, self._due = self._interrupted + 1, now, error
            if self._in_main:
                signal.pthread_kill(self._thread, _WAKE)
            else:
                _raise_in(self._thread, error)

    def _rescue(self, error: type[BaseException]) -> None:
        with self._ending:
            if self._since is None:
                return  # the call returned in the last moment
            self._rescuing = True
        if self._guardian is not None:
            self._guardian.rest()  # saving may take long
        assert RUN.rescue is not None
        if error is StopRequestedError:
            number = RUN.asked_to_end or RUN.arrived or signal.SIGTERM
            RUN.rescue(f"stopped by {number.name} while {self.name} did not return", 128 + number)
        else:
            RUN.rescue(
                f"{self.name} {self.overdue} and cannot be interrupted{self._option}; correct it, or run it in a process"
                " that can be killed with reward.separate_process = true",
                2,
            )


_WATCHED: set[int] = set()
"""The process whose main thread is in a `UserCode`; empty outside."""


_BLOCKED: list[set[Any]] = []
"""The signal mask before a fork of the user's code, while it lasts."""


def _hold_signals() -> None:
    """Before a fork: no signal may reach the child while it still has our handlers and shares the pipe of its parent."""
    if _WATCHED:
        _BLOCKED.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)))


def _release_signals() -> None:
    if _BLOCKED:
        signal.pthread_sigmask(signal.SIG_SETMASK, _BLOCKED.pop())


def _give_up_signals() -> None:
    """In the child: signals are its own."""
    if _WATCHED:
        _WATCHED.clear()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in _ENDING | {_WAKE}:
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    _release_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_give_up_signals)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in another thread once it runs Python code; None takes back one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error))
