"""Settings of the process around user code that runs in two threads at once."""

import signal
import sys
import threading

from legato.core.protection import settings_restored


def test_overlapping_contexts_leave_the_outputs_as_they_were() -> None:
    before = (sys.stdout, sys.stderr)
    for _ in range(5):
        entered, leave = threading.Event(), threading.Event()

        def background(entered: threading.Event = entered, leave: threading.Event = leave) -> None:
            with settings_restored():
                entered.set()
                leave.wait(10)

        thread = threading.Thread(target=background)
        thread.start()
        entered.wait(10)
        with settings_restored():
            leave.set()
            thread.join(10)
            assert sys.stdout is not before[0], "a user's `close` must not close the run's output"
        assert (sys.stdout, sys.stderr) == before


def test_a_background_thread_does_not_touch_signal_handlers() -> None:
    problems: list[BaseException] = []
    entered, leave = threading.Event(), threading.Event()

    def background() -> None:
        try:
            with settings_restored():
                entered.set()
                leave.wait(10)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=background)
    thread.start()
    entered.wait(10)
    own = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        leave.set()
        thread.join(10)
        assert problems == [] and signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, own)
