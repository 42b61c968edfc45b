"""The engine of a run: opened with a folder of the run's own and a voice, closed with the run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from legato.records.directory import RunDirectory
from legato.rollouts.engine import EnginePlace
from legato.run.watcher import Watcher
from legato.training.collect import Collector


class EngineVoice:
    """Shows what an engine says and stores it with the run; until the records are ready it only shows it."""

    def __init__(self, directory: RunDirectory, watcher: Watcher) -> None:
        self._directory, self._watcher = directory, watcher
        self._steps_done: Callable[[], int] | None = None
        self._kept: list[str] = []

    def say(self, text: str) -> None:
        self._watcher.message(text)
        if self._steps_done is None:
            self._kept.append(text)
        else:
            self._record(text)

    def begin(self, steps_done: Callable[[], int]) -> None:
        """The records are ready: what was said is stored, with the number of steps that are done."""
        self._steps_done = steps_done
        for text in self._kept:
            self._record(text)
        self._kept.clear()

    def _record(self, text: str) -> None:
        assert self._steps_done is not None
        self._directory.append_metrics({"kind": "note", "step": self._steps_done(), "text": text})

    def place_of(self, collector: Collector) -> EnginePlace:
        """Where the engine of a collector may write, how it speaks, and where it finds the weights."""
        folder = self._directory.path.absolute() / "servers"
        return EnginePlace(folder=folder, say=self.say, weights=collector.runner.weights)


@contextmanager
def closing_engine(collector: Collector) -> Iterator[None]:
    """Ends what the engine of a run has started, whatever ended the run."""
    try:
        yield
    finally:
        collector.runner.engine.close()
