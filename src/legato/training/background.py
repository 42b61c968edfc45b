"""A thread that samples and scores groups while the policy trains.

It owns one session on the engine. A group is stored (`store`) before anyone sees it, so that a killed run does not lose what
it may already have used. What goes wrong in the thread is raised in the main thread when it next waits for a group.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from legato.core.rollout import Rollout
from legato.core.user_code import GRACE_SECONDS, RUN, StopRequestedError
from legato.rollouts.episodes import Runner, Start
from legato.rollouts.sampling import Sampling
from legato.training.play import Judge, score_rollouts
from legato.training.ranks.exchange import ScoredRollout

_LOOK_SECONDS = 0.2
_CLOSE_SECONDS = 10.0


Sampled = tuple[int, Start, list[ScoredRollout]]
"""A complete group: the number of its problem, what was asked for, and the scored rollouts."""


class Turns:
    """A lock around the user's code, which two threads call, one at a time. A thread may take it twice."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0
        self.is_waited_for = False
        """Whether the main thread waits for its turn."""

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self.is_waited_for = self.is_waited_for or is_main
        self._lock.acquire()
        if is_main:
            self.is_waited_for = False
        self._holder, self._depth = threading.get_ident(), self._depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether a thread that is not the main one calls the user's code."""
        return self._holder is not None and self._holder != threading.main_thread().ident


class Background:
    """Groups in flight, by the number of their problem. All methods are called by the main thread."""

    def __init__(
        self,
        runner: Runner,
        judge: Judge,
        sampling: Sampling,
        store: Callable[[Sequence[Sampled]], None],
    ) -> None:
        # The session publishes the first weights and reads `max_turns`: both in the main thread.
        self._runner, self._judge, self._store = runner, judge, store
        self._session = runner.session(sampling)
        self._adding = threading.Lock()
        """Held while a group is submitted and noted. Submitting may run the user's code, which may hang, so that nothing
        that a save needs waits for this lock."""
        self._news = threading.Condition()
        """Guards everything below."""
        self._asked: list[tuple[int, Start]] = []
        """Starts that the thread has not submitted yet."""
        self._in_flight: dict[int, tuple[int, Start]] = {}
        """The number of the problem and the start, by the number that the session gave it."""
        self._done: dict[int, list[ScoredRollout]] = {}
        self._fault: BaseException | None = None
        self._closed = False
        self.is_waited_for = False
        """Whether the main thread waits for a group: no update is in progress."""
        self._thread = threading.Thread(target=self._run, name="sampling ahead", daemon=True)
        self._thread.start()

    def ask(self, starts: Mapping[int, Start]) -> None:
        """Ask for groups, by number."""
        if not starts:
            return
        if self._runner.engine.capabilities.concurrent:
            # Not left to the thread, which may be waiting for the slowest of the responses it has.
            with self._adding:
                added = self._session.add(list(starts.values()))
                with self._news:
                    self._in_flight |= dict(zip(added, starts.items(), strict=True))
                    self._news.notify_all()
            return
        with self._news:
            self._asked += starts.items()
            self._news.notify_all()

    def take(self, numbers: Sequence[int]) -> list[list[ScoredRollout]]:
        """Wait for groups and hand them over. After a signal the wait ends early: the groups are asked for again later."""
        self.is_waited_for = True
        try:
            with self._news:
                while any(number not in self._done for number in numbers):
                    if self._fault is not None:
                        raise self._fault
                    if RUN.asked_to_end is not None and time.monotonic() - RUN.asked_at >= GRACE_SECONDS:
                        raise StopRequestedError
                    self._news.wait(_LOOK_SECONDS)
                return [self._done.pop(number) for number in numbers]
        finally:
            self.is_waited_for = False

    def finished(self, numbers: Sequence[int]) -> dict[int, list[ScoredRollout]]:
        """Those of the groups that are complete. They stay here."""
        with self._news:
            return {number: self._done[number] for number in numbers if number in self._done}

    def close(self) -> None:
        """Give up all groups and end the thread."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._runner.engine.capabilities.concurrent:
            self._session.cancel()
        # Else the thread cancels after its poll: an engine that hangs must not keep the run from ending.
        self._thread.join(_CLOSE_SECONDS)

    # The thread

    def _run(self) -> None:
        try:
            while self._submit_asked():
                played = self._session.advance()
                if played and not self._closed:
                    self._finish(played)
            self._session.cancel()
        except BaseException as error:
            with self._news:
                self._fault = error
                self._news.notify_all()

    def _submit_asked(self) -> bool:
        """Submit what was asked for, and wait until anything is in flight; False if the thread is to end."""
        with self._news:
            while not self._closed and not self._asked and not self._session.outstanding:
                self._news.wait()
            starts, self._asked = self._asked, []
        if self._closed:
            return False
        if starts:
            with self._adding:
                places = self._session.add([start for _, start in starts])
                with self._news:
                    self._in_flight |= dict(zip(places, starts, strict=True))
        return True

    def _finish(self, played: Mapping[int, list[Rollout]]) -> None:
        with self._runner.turns:
            scores = iter(score_rollouts(self._judge, [rollout for row in played.values() for rollout in row]))
        with self._adding, self._news:  # `ask` holds the first until the number is known
            starts = [self._in_flight.pop(place) for place in played]
        rows = [[(rollout, next(scores)) for rollout in row] for row in played.values()]
        sampled = [(number, start, row) for (number, start), row in zip(starts, rows, strict=True)]
        if self._closed:
            return
        self._store(sampled)
        with self._news:
            self._done |= {number: row for number, _, row in sampled}
            self._news.notify_all()
