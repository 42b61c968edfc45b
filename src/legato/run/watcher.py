"""The interface that shows the progress of a run: on a terminal, in a notebook, or not at all."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Watcher(Protocol):
    """Callbacks of a run; `cli/display.py` has two implementations. Empty bodies let a subclass override only some."""

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


class Silent(Watcher):
    """Shows nothing."""
