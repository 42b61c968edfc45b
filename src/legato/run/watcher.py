"""Who is told how a run goes: a terminal, a notebook, nobody."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Watcher(Protocol):
    """What a run calls as it goes; `cli/display.py` has two of them. Bodies are there for those who only listen to some."""

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
    """Nobody looks on."""
