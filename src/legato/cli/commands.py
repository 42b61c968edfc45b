"""The commands that need a model, with their output. Imported only when such a command runs."""

import io
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from legato.cli.display import for_terminal
from legato.cli.ending import end_screen
from legato.config.load import load
from legato.config.sources import split_words
from legato.errors import InputError
from legato.pages.legible import legible
from legato.pages.report import write_report
from legato.pages.several import write_several
from legato.pages.summary import samples, summary
from legato.records.directory import RunDirectory
from legato.run import wire
from legato.run.again import resume_advice
from legato.run.evaluate import evaluate
from legato.run.execute import STOPPED_BY_WATCH
from legato.run.export import export
from legato.run.sample import sample
from legato.run.target import find, warn
from legato.run.train import Run, resume, start


def train_command(arguments: Sequence[str]) -> int:
    files, words = split_words(arguments)
    if not arguments:
        raise InputError(
            "expected a recipe or options, got nothing; for instance: legato train recipes/tiny.toml training.seed=1"
        )
    run = start(load([Path(file) for file in files], words), wire.Given(), for_terminal())
    _print_ending(run)
    return run.exit_code


def resume_command(path: Path, words: Sequence[str], allow_changes: bool, step: int | None) -> int:
    run = resume(path, words, watcher=for_terminal(), allow_changes=allow_changes, step=step)
    _print_ending(run)
    return run.exit_code


def _program() -> str:
    """The program name as it was called, so that printed commands can be copied."""
    return sys.argv[0] if Path(sys.argv[0]).name == "legato" else "legato"


def _print_ending(run: Run) -> None:
    directory = RunDirectory.open(run.directory)
    if run.exit_code:
        # Without a checkpoint the run cannot be resumed; the reason says what to do.
        lost = run.exit_code == STOPPED_BY_WATCH
        following = "" if run.model_folder is None else f"\nnext       {resume_advice(directory, _program(), lost=lost)}"
        Console(highlight=False).print(f"{run.reason}{following}", soft_wrap=True, markup=False)
        return
    end_screen(
        summary(directory),
        samples=samples(directory),
        checkpoint=run.model_folder,
        report=directory.report_path,
        next_command=f"{_program()} sample {shlex.quote(str(run.directory))}",
    )


def eval_command(
    target: str,
    words: Sequence[str],
    *,
    number_of_samples: int,
    greedy: bool,
    temperature: float | None,
    problems: int | None,
    file: Path | None,
    output: Path | None,
) -> None:
    result = evaluate(
        find(target, words), samples=number_of_samples, greedy=greedy, temperature=temperature, problems=problems, file=file
    )
    table = Table(title=f"{result.problems} problems", title_justify="left")
    for heading in ("measure", "accuracy", "95 % interval"):
        table.add_column(heading)
    for row in result.rows:
        table.add_row(row.name, f"{row.value:.1%}", f"{row.low:.1%} .. {row.high:.1%}")
    console = Console(highlight=False)
    console.print(table)
    if result.unscorable:
        console.print(f"{result.unscorable} responses could not be scored and count as wrong")
    if output is not None:
        record = {
            "problems": result.problems,
            "samples": result.samples,
            "measures": {row.name: {"value": row.value, "low": row.low, "high": row.high} for row in result.rows},
        }
        output.write_text(json.dumps(record, indent=1) + "\n")


def sample_command(
    target: str,
    prompts: Sequence[str],
    *,
    file: Path | None,
    number_of_samples: int,
    temperature: float | None,
    max_response_tokens: int | None,
) -> None:
    run_target = find(target)
    console = Console(highlight=False)
    answers = sample(
        run_target,
        map(_check_unicode, _prompts(prompts, file)),
        samples=number_of_samples,
        temperature=temperature,
        max_response_tokens=max_response_tokens,
    )
    for each in answers:
        console.print(Text(legible(each.prompt), style="dim"))
        for response in each.responses:
            console.print(Text(f"  {legible(response.text)}"), Text(f"  ({response.stop.value})", style="dim"))


def _check_unicode(prompt: str) -> str:
    """The prompt; InputError if it holds bytes that are not UTF-8, which Python keeps as lone surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError(f"expected a prompt in UTF-8, got {prompt!r}; convert it, as with iconv") from None
    return prompt


def _prompts(prompts: Sequence[str], file: Path | None) -> Iterator[str]:
    yield from prompts
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        yield from (line for line in lines if line.strip())
    if not prompts and file is None:
        if sys.stdin.isatty():
            print("Type a prompt, an empty line ends.", file=sys.stderr)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        for line in sys.stdin:
            if not line.strip():
                return
            yield line.rstrip("\n")


def export_command(target: str, folder: Path, step: int | None, merge: bool, allow_older: bool) -> None:
    # Without --allow-older the warnings are part of the error.
    run_target = find(target, step=step, say=warn if allow_older else lambda text: None)
    export(run_target, folder, merge=merge, allow_older=allow_older)
    print(f"{folder} holds the model; transformers' AutoModelForCausalLM.from_pretrained loads it")


def report_command(paths: Sequence[Path], output: Path) -> None:
    directories = [RunDirectory.open(path) for path in paths]
    print(write_report(directories[0]) if len(directories) == 1 else write_several(directories, output))
