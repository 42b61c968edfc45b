"""Runs `legato mismatch`: prints its tables and writes mismatch.json and mismatch.html."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from legato.cli.tables import show_table
from legato.errors import InputError
from legato.pages.mismatch import Rows, floor_rows, gap_rows, page, share, verdicts
from legato.records.lines import finite
from legato.run.mismatch import KINDS, compare_samplers, parse_samplers
from legato.run.target import find


def mismatch_command(target: str, words: Sequence[str], *, kinds: str | None, prompts: int | None, output: Path) -> None:
    samplers = parse_samplers(",".join(KINDS) if kinds is None else kinds)
    run_target = find(target, words)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"expected a folder that can be written, got {output} (--output): {error.strerror}") from None
    result = finite(
        compare_samplers(run_target, samplers, prompts=prompts, say=lambda text: print(f"sampling: {text}", file=sys.stderr))
    )
    (output / "mismatch.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "mismatch.html").write_text(page(result))
    console = Console(highlight=False)
    measured = result["samplers"]
    _show(console, "old - behaviour", gap_rows(measured))
    _show(console, "Noise of log s before any update", floor_rows(measured))
    cut = [
        [name, *(share(each["corrections"][name]["cut"]) for each in measured.values())]
        for name in _capped_corrections(measured)
    ]
    _show(console, "Share of weights a correction cuts", (("correction", *measured), cut))
    for line in verdicts(result):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{output / 'mismatch.html'} has all of it, {output / 'mismatch.json'} the numbers", soft_wrap=True)


def _capped_corrections(measured: Mapping[str, Any]) -> list[str]:
    first = next(iter(measured.values()))
    return [name for name in first["corrections"] if not name.endswith("uncapped")]


def _show(console: Console, title: str, rows: Rows) -> None:
    headings, cells = rows
    console.print()
    show_table(console, title, headings, cells)
