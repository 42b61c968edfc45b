"""What `legato study` prints: a line as each run starts and ends, then the comparisons and the verdict."""

import math
from pathlib import Path

from rich.console import Console
from rich.text import Text

from legato.cli.comparison import chosen_machine
from legato.cli.output import say_on
from legato.cli.tables import show_tables
from legato.compare.definition import read_seeds
from legato.compare.registration import read_study
from legato.compare.study import run_study
from legato.errors import InputError
from legato.lab.measured import measure_study
from legato.pages.study import tables


def study_command(
    file: Path,
    *,
    parallel: int,
    gpus: str,
    out: Path | None,
    pilot: bool,
    only: str | None,
    seeds: str | None,
    minutes: float | None,
    finished: list[Path],
    export: Path | None,
    retry_failed: bool,
    keep_checkpoints: bool,
) -> int:
    console = Console(highlight=False)
    study = read_study(file)
    seconds = math.inf if minutes is None else 60 * minutes
    if study.measure is not None:
        given = {
            "--parallel": parallel,
            "--gpus": gpus,
            "--only": only,
            "--seeds": seeds,
            "--import": finished,
            "--export": export,
            "--retry-failed": retry_failed,
            "--drop-checkpoints": not keep_checkpoints,
        }
        useless = [option for option, value in given.items() if value]
        if useless:
            raise InputError(
                f"expected --out, --pilot and --minutes only, got {', '.join(useless)}: {file} trains nothing; it measures"
                " seed by seed, on one core of this machine"
            )
        result = measure_study(study, folder=out, pilot=pilot, seconds=seconds, say=say_on(console))
    else:
        result = run_study(
            study,
            folder=out,
            machine=chosen_machine(parallel, gpus),
            pilot=pilot,
            only=None if only is None else [only],
            seeds=None if seeds is None else read_seeds(seeds),
            seconds=seconds,
            finished=finished,
            export=export,
            retry_failed=retry_failed,
            keep_checkpoints=keep_checkpoints,
            say=say_on(console),
        )
    show_tables(console, tables(result.results))
    console.print()
    console.print(Text(f"verdict    {result.results['verdict']}"))
    console.print(Text(f"page       {result.folder / 'study.html'}"), soft_wrap=True)
    return result.exit_code
