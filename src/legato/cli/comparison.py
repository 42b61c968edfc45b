"""Runs `legato compare` and prints a line as each run starts and ends, then the tables."""

import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from legato.cli.output import say_on
from legato.cli.tables import show_tables
from legato.compare.compare import compare
from legato.compare.definition import Definition
from legato.compare.processes import Machine
from legato.errors import InputError
from legato.pages.comparison_tables import sentences, tables
from legato.pages.legible import legible


def compare_command(
    definition: Definition, *, parallel: int, gpus: str, out: Path | None, retry_failed: bool, keep_checkpoints: bool
) -> int:
    console = Console(highlight=False)
    comparison = compare(
        definition,
        folder=out,
        machine=chosen_machine(parallel, gpus),
        retry_failed=retry_failed,
        keep_checkpoints=keep_checkpoints,
        say=say_on(console),
    )
    show_tables(console, tables(comparison.results))
    console.print()
    for sentence in sentences(comparison.results):
        console.print(Text(legible(sentence, one_line=True)))
    console.print(Text(f"page       {comparison.folder / 'compare.html'}"), soft_wrap=True)
    return comparison.exit_code


def chosen_machine(parallel: int, gpus: str) -> Machine:
    """The machine that --parallel and --gpus ask for."""
    names = tuple(word.strip() for word in gpus.split(",")) if gpus else ()
    if not all(re.fullmatch(r"[A-Za-z0-9-]+", word) for word in names):
        raise InputError(f"expected numbers as in 0,1,2,3, got {gpus!r} (--gpus)")
    return Machine(parallel=parallel or max(1, len(names)), gpus=names)
