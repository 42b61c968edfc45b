"""Ranks agree on every choice that depends on time, signals, memory or measurements."""

import signal
from typing import Any

import pytest

from legato.core.world import OneProcess
from legato.run.interrupt import Interrupt
from tests.training.test_trainer import trainer


class Outvoted(OneProcess):
    """A world in which another rank always chooses the larger number."""

    size = 2

    def __init__(self, other: int) -> None:
        self.other = other
        self.choices: list[int] = []

    def agree(self, choice: int) -> int:
        self.choices.append(choice)
        return max(choice, self.other)


def test_the_number_of_passes_is_agreed_on() -> None:
    this = trainer(update_passes="auto", probe_every_steps=0)
    this.world = Outvoted(2)
    report = this.step()
    assert report.metrics["update/two_pass"] == 1.0, "this rank alone would have made one pass"
    assert this.world.choices.count(1) == 4


@pytest.mark.parametrize(("other", "choice"), [(0, "sampler"), (1, "recompute")])
def test_the_anchor_is_agreed_on(other: int, choice: str) -> None:
    this = trainer(anchor="auto", update_passes="one")
    this.world = Outvoted(other)
    this.step()
    assert this.anchor_choice == choice


def test_a_signal_that_reached_another_rank_ends_this_one_too() -> None:
    messages: list[str] = []
    interrupt = Interrupt(messages.append)
    assert not interrupt.reached_any(OneProcess())
    assert interrupt.reached_any(Outvoted(int(signal.SIGTERM)))
    assert interrupt.received is signal.SIGTERM and interrupt.exit_code == 143


def test_metrics_are_of_all_ranks() -> None:
    class Doubled(OneProcess):
        def sum_metrics(self, sums: Any) -> Any:
            return sums + sums

    alone, both = trainer(update_passes="one"), trainer(update_passes="one")
    both.world = Doubled()
    mine, together = alone.step().metrics, both.step().metrics
    assert together["loss/total"] == pytest.approx(2 * mine["loss/total"]), "a total adds up over ranks"
    assert together["ratio/sequence_mean"] == pytest.approx(mine["ratio/sequence_mean"]), "a mean does not"
