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

from legato.cli.ending import end_screen
from legato.cli.sets import print_sets, sets_record
from legato.config.from_trl import Translation
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
from legato.run.display import PlainDisplay, for_terminal
from legato.run.evaluate import evaluate, evaluate_sets
from legato.run.execute import STOPPED_BY_WATCH
from legato.run.export import export
from legato.run.from_trl import resolve_trl
from legato.run.sample import sample
from legato.run.target import find, warn
from legato.run.train import Run, resume, start, start_or_resume

_OF_A_RECIPE = ("policy", "task", "reward")
"""The tables that say what is trained on what. Without them and without a recipe, that of the tiny model is meant."""


def train_command(
    arguments: Sequence[str],
    from_trl: Translation | None = None,
    *,
    resume_if_exists: bool = False,
    allow_changes: bool = False,
    dry_run: bool = False,
) -> int:
    if allow_changes and not resume_if_exists:
        raise InputError("expected --resume-if-exists beside --allow-changes, got none; a new run has nothing to change")
    files, words = split_words(arguments)
    recipes, notes = [Path(file) for file in files], list[str]()
    if not recipes and from_trl is None and not any(word.startswith(_OF_A_RECIPE) for word in words):
        recipes = [Path("recipes/tiny.toml")]
        notes.append("the recipe is recipes/tiny.toml, since no recipe, model, task or reward was named")
    if from_trl is None:
        resolved = load(recipes, words)
    else:
        resolved, of_trl = resolve_trl(from_trl, recipes, words, None, wire.PythonObjects())
        notes += of_trl
    if dry_run:
        run = start(resolved, wire.PythonObjects(), PlainDisplay(sys.stdout), notes=notes, dry_run=True)
        if not run.rank:
            print(run.reason)
        return 0
    if resume_if_exists:
        run = start_or_resume(resolved, wire.PythonObjects(), for_terminal(), notes=notes, allow_changes=allow_changes)
    else:
        run = start(resolved, wire.PythonObjects(), for_terminal(), notes=notes)
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
    if run.rank:
        return
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
        next_command=_next_command(directory),
    )


def _next_command(directory: RunDirectory) -> str:
    """The next useful command after a finished run: what went wrong, or else what it has learned."""
    worrying = any(record.get("level") in ("warning", "alarm") for record in directory.health.readable())
    verb = "doctor" if worrying or not directory.checkpoint_steps() else "sample"
    return f"{_program()} {verb} {shlex.quote(str(directory.path))}"


def eval_command(
    arguments: Sequence[str],
    *,
    number_of_samples: int,
    greedy: bool,
    temperature: float | None,
    problems: int | None,
    file: Path | None,
    output: Path | None,
    step: int | None,
    sets: str | None,
    server: str | None,
) -> None:
    targets, words = split_words(arguments)
    if not targets:
        raise InputError("expected a run directory, a recipe or a model, got options only; name it first")
    if server is not None and len(targets) > 1:
        raise InputError(f"expected one target with --server, got {' and '.join(targets)}; a server has one model")
    if sets is not None or len(targets) > 1:
        _check_held_out_options(targets, file, step)
        runs = {target: find(target, words, step, sets=sets) for target in targets}
        for target, each in runs.items():
            if not each.resolved.config.evaluation.sets:
                raise InputError(
                    f"expected evaluation sets to measure {' and '.join(targets)} on, got none ({target}); name them with"
                    " --sets, or in its recipe as [[evaluation.sets]]"
                )
        results = {target: evaluate_sets(each, server) for target, each in runs.items()}
        if len({tuple((each.name, *each.values) for each in result) for result in results.values()}) > 1:
            raise InputError("expected targets with the same evaluation sets, got others; name them with --sets")
        print_sets(results)
        if output is not None:
            output.write_text(json.dumps({target: sets_record(each) for target, each in results.items()}, indent=1) + "\n")
        return
    result = evaluate(
        find(targets[0], words, step),
        samples=number_of_samples,
        greedy=greedy,
        temperature=temperature,
        problems=problems,
        file=file,
        server=server,
    )
    table = Table(title=f"{result.problems} problems", title_justify="left")
    for heading in ("measure", "accuracy", "95 % interval"):
        table.add_column(heading)
    for row in result.rows:
        table.add_row(row.name, f"{row.value:.1%}", f"{row.low:.1%} .. {row.high:.1%}")
    console = Console(highlight=False)
    console.print(table)
    if result.reward is not None:
        console.print(f"mean reward {result.reward:.4g}; for accuracy, verdicts above 1 count as 1 and those below 0 as 0")
    if result.unscorable:
        console.print(f"{result.unscorable} responses could not be scored and count as wrong")
    if result.sets:
        print_sets({targets[0]: result.sets})
    if output is not None:
        record = {
            "problems": result.problems,
            "samples": result.samples,
            "measures": {row.name: {"value": row.value, "low": row.low, "high": row.high} for row in result.rows},
        }
        if result.reward is not None:
            record["reward"] = result.reward
        if result.sets:
            record["sets"] = sets_record(result.sets)
        output.write_text(json.dumps(record, indent=1) + "\n")


def _check_held_out_options(targets: Sequence[str], file: Path | None, step: int | None) -> None:
    """InputError for options that mean nothing where only evaluation sets are measured."""
    if file is not None:
        raise InputError("expected --file or --sets, got both or several targets; a file is a set too: task.kind = 'jsonl'")
    if len(targets) > 1 and step is not None:
        raise InputError(f"expected one run with --step, got {' and '.join(targets)}; give the model folders of checkpoints")


def sample_command(
    target: str,
    prompts: Sequence[str],
    *,
    file: Path | None,
    number_of_samples: int,
    temperature: float | None,
    max_response_tokens: int | None,
    server: str | None,
) -> None:
    run_target = find(target)
    console = Console(highlight=False)
    answers = sample(
        run_target,
        map(_check_unicode, _prompts(prompts, file)),
        samples=number_of_samples,
        temperature=temperature,
        max_response_tokens=max_response_tokens,
        server=server,
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
        yield from _typed_prompts()


def _typed_prompts() -> Iterator[str]:
    """Prompts from standard input up to an empty line. InputError if there is none and nobody can type one."""
    terminal, number = sys.stdin.isatty(), 0
    if terminal:
        print("Type a prompt, an empty line ends.", file=sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for line in sys.stdin:
        if not line.strip():
            break
        number += 1
        yield line.rstrip("\n")
    if not number and not terminal:
        raise InputError(
            'expected a prompt, got an empty standard input; give one as a word (legato sample MODEL "12+3=") or in a file'
            " (--file)"
        )


def export_command(target: str, folder: Path, step: int | None, merge: bool, allow_older: bool, dtype: str | None) -> None:
    # Without --allow-older the warnings are part of the error.
    run_target = find(target, step=step, say=warn if allow_older else lambda text: None)
    export(run_target, folder, merge=merge, allow_older=allow_older, dtype=dtype)
    print(f"{folder} holds the model; transformers' AutoModelForCausalLM.from_pretrained loads it")


def report_command(paths: Sequence[Path], output: Path) -> None:
    directories = [RunDirectory.open(path) for path in paths]
    print(write_report(directories[0]) if len(directories) == 1 else write_several(directories, output))
