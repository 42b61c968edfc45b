"""Runs what blocks elsewhere, and collects the results: threads in a run, simulated time in tests."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Transport(Protocol):
    """Work that blocks, its results, and the time."""

    def now(self) -> float:
        """Seconds, from any start."""

    def send(self, key: Any, work: Callable[[], Any]) -> None:
        """Run `work` elsewhere. `wait` reports its result, or the exception it raised, under the key."""

    def wait(self, seconds: float) -> list[tuple[Any, Any]]:
        """The results that are there; waits at most so long for the first."""

    def all(self, works: list[Callable[[], Any]]) -> list[Any]:
        """The result, or the exception, of each work. All run at once, and nothing else is reported meanwhile."""

    def close(self) -> None:
        """End what can be ended. Results that are outstanding are never reported."""


class Threads:
    """A thread for each work that is outstanding. Idle threads are used again; all are daemons."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Any, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0
        self._closed = False

    def now(self) -> float:
        return time.monotonic()

    def send(self, key: Any, work: Callable[[], Any]) -> None:
        with self._lock:
            self._busy += 1
            if self._busy > self._threads:
                self._threads += 1
                threading.Thread(target=self._work, name=f"fleet-{self._threads}", daemon=True).start()
        self._tasks.put((key, work))

    def wait(self, seconds: float) -> list[tuple[Any, Any]]:
        results = []
        try:
            results.append(self._results.get(timeout=max(0.0, seconds)))
            while True:
                results.append(self._results.get_nowait())
        except queue.Empty:
            return results

    def all(self, works: list[Callable[[], Any]]) -> list[Any]:
        if len(works) == 1:
            return [_result(works[0])]
        results: list[Any] = [None] * len(works)

        def run(place: int) -> None:
            results[place] = _result(works[place])

        threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # signal handlers run in between
        return results

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            key, work = task
            result = _result(work)
            with self._lock:
                self._busy -= 1
                if self._closed:
                    return
            self._results.put((key, result))


def _result(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # handed to whoever waits for the result
        return error
