"""Shipped models on 1, 8, 64 and 512 GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from legato.capacity.planning import Plan
from legato.capacity.remedies import fit_without_other_results
from legato.capacity.setup import Setup

GPUS = (1, 8, 64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model on a number of GPUs."""

    model: str
    gpus: int
    plan: Plan | None
    """The fastest plan that fits and changes no result; None if none fits."""


def table_of(setups: Sequence[Setup], gpus: Sequence[int] = GPUS) -> list[list[Cell]]:
    """A row for each setup, which is of one GPU: the same load on each GPU, so that a step has N times its prompts."""
    return [[_cell(setup, count) for count in gpus] for setup in setups]


def _cell(setup: Setup, gpus: int) -> Cell:
    larger = replace(setup.on(gpus), prompts=setup.prompts * gpus)
    return Cell(model=setup.model.name, gpus=gpus, plan=fit_without_other_results(larger))
