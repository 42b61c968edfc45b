"""The command line `legato`.

Exit codes: 0 done, 1 our own fault, 2 bad input or a disk that cannot be written (one message, no traceback), 3 stopped by
the health watch. A signal ends a run with its state saved: 129 SIGHUP, 130 SIGINT, 138 SIGUSR1, 143 SIGTERM. SIGUSR2 saves
and the run goes on. A log that is closed or full changes no exit code of a verb that trains or writes files.
"""

import errno
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from legato import __version__
from legato.cli.laboratory import lab
from legato.cli.output import lost_output, safe_output
from legato.errors import InputError, shorten
from legato.records.room import is_of_the_disk, os_error_of, reason

_PRINTING = (None, "explain", "eval", "sample", "doctor")
"""Verbs whose result is what they print (None: --help and --version); the others write files."""


class _Verbs(TyperGroup):
    """The verbs. Typer takes every BrokenPipeError for one of the standard output and ends with exit code 1 in silence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise RuntimeError(f"BrokenPipeError: {error}") from error


_LONGEST_LINE = 2000
"""Of an error message, in characters."""

app = typer.Typer(
    name="legato",
    cls=_Verbs,
    help="Reinforcement learning for language models with ratio, clip and credit over the whole response.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(lab, name="lab")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"legato {__version__}")
        raise typer.Exit


@app.callback()
def door(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Reinforcement learning for language models with ratio, clip and credit over the whole response."""
    # OpenMP threads spin while they wait for each other. If other processes use the cores, steps then take minutes.
    # A short spin and then sleep costs about a tenth of a step of the tiny model on idle cores. Torch reads these variables
    # when it is first imported, which no command has done yet.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


@app.command()
def explain(
    names: Annotated[
        list[str] | None, typer.Argument(help="An algorithm or a part, or several algorithms side by side.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="An override as path=value, applied to every algorithm named."),
    ] = None,
) -> None:
    """Print an algorithm or a part: formula, values, what it reads, what to beware of; several: how they differ.

    Without a name: all algorithms and all parts.
    """
    from legato.cli.explain import explain_all, explain_one, explain_several

    if not names:
        explain_all()
    elif len(names) == 1:
        explain_one(names[0], change or [])
    else:
        explain_several(names, change or [])


@app.command()
def train(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE]... [PATH=VALUE]...", help="TOML files, then options.")
    ] = None,
) -> None:
    """Train a model: legato train recipes/tiny.toml training.seed=1"""
    _refuse_unknown_options(arguments)
    from legato.cli.commands import train_command

    raise typer.Exit(train_command(arguments or []))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[PATH=VALUE]...", help="Options to change.")] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Allow changes of the training (docs/resume.md).")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Go back to the checkpoint of this step; later records move to RUN/given-up.")
    ] = None,
) -> None:
    """Continue a run from its newest whole checkpoint, or from an earlier one."""
    _refuse_unknown_options(words)
    from legato.cli.commands import resume_command

    raise typer.Exit(resume_command(run, words or [], allow_changes, step))


@app.command()
def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]... [PATH=VALUE]...", help="A comparison file, or recipes; options of every arm."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="An algorithm, or 'NAME PATH=VALUE ...'. The first is what the others are compared with."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="As in 0,1,2 or 0-4; without it 0,1,2.")] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="PATH=VALUE,VALUE: every arm at each; finds where each becomes unstable.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=0, help="Runs at once; 0: one per GPU given, else one.")] = 0,
    gpus: Annotated[str, typer.Option(help="GPUs to deal the runs to, as in 0,1,2,3.")] = "",
    out: Annotated[Path | None, typer.Option(help="The folder of the comparison; else runs/compare-RECIPE.")] = None,
    unequal: Annotated[bool, typer.Option("--unequal", help="Arms may differ in problems, model or budget.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what failed before.")] = False,
) -> None:
    """Compare arms over seeds: legato compare recipes/tiny.toml --arm grpo --arm gspo --seeds 0-4

    The same command again goes on where it was stopped.
    """
    # A file may be that of a comparison, which has other tables.
    _refuse_unknown_options([word for word in arguments or [] if "=" in word and not word.endswith(".toml")])
    from legato.cli.comparison import compare_command

    code = compare_command(
        arguments or [],
        arms=arm or [],
        seeds=seeds,
        sweep=sweep or [],
        parallel=parallel,
        gpus=gpus,
        out=out,
        unequal=unequal,
        retry_failed=retry_failed,
    )
    raise typer.Exit(code)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="A study file: question, arms, seeds, beds, endpoint, comparisons.")],
    parallel: Annotated[int, typer.Option(min=0, help="Runs at once; 0: one per GPU given, else one.")] = 0,
    gpus: Annotated[str, typer.Option(help="GPUs to deal the runs to, as in 0,1,2,3.")] = "",
    out: Annotated[Path | None, typer.Option(help="The folder of the study; else runs/study-FILE.")] = None,
    pilot: Annotated[bool, typer.Option("--pilot", help="Run the pilot seeds, in a folder of their own.")] = False,
    only: Annotated[str | None, typer.Option(help="Run one run of the study, by its name.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what failed before.")] = False,
) -> None:
    """Run a registered study: legato study studies/frontier.toml --gpus 0 --parallel 16

    The same command again goes on where it was stopped. Nothing is compared before the last run has ended.
    """
    from legato.cli.study import study_command

    code = study_command(file, parallel=parallel, gpus=gpus, out=out, pilot=pilot, only=only, retry_failed=retry_failed)
    raise typer.Exit(code)


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(help="A run directory, a recipe, or a model (folder or name).")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[PATH=VALUE]...", help="Options.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Responses per problem: avg@n and pass@k.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy/--no-greedy", help="Greedy accuracy too.")] = True,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Temperature of the sampled responses; 0: greedy.")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="How many problems.")] = None,
    file: Annotated[Path | None, typer.Option(help="Problems from a JSONL or Parquet file (prompt, answer).")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Measure accuracy: greedy, avg@n and pass@k with 95 % intervals."""
    _refuse_unknown_options(words)
    from legato.cli.commands import eval_command

    eval_command(
        target,
        words or [],
        number_of_samples=samples,
        greedy=greedy,
        temperature=temperature,
        problems=problems,
        file=file,
        output=output,
    )


@app.command()
def sample(
    target: Annotated[str, typer.Argument(help="A run directory, a recipe, or a model (folder or name).")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none: read from the terminal.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with a prompt per line.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0: greedy.")] = None,
    max_response_tokens: Annotated[int | None, typer.Option(min=1, help="The longest response.")] = None,
) -> None:
    """Sample responses to prompts."""
    from legato.cli.commands import sample_command

    sample_command(
        target,
        prompts or [],
        file=file,
        number_of_samples=samples,
        temperature=temperature,
        max_response_tokens=max_response_tokens,
    )


@app.command()
def mismatch(
    target: Annotated[str, typer.Argument(help="A run directory, a recipe, or a model (folder or name).")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[PATH=VALUE]...", help="Options.")] = None,
    kinds: Annotated[
        str | None, typer.Option(help="Which samplers, as in none,bf16,int8,perturbed:0.01,stale:8,top-p:0.9; none: all.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=2, help="How many problems; else training.prompts_per_step.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for mismatch.json and mismatch.html.")] = Path("mismatch"),
) -> None:
    """Measure samplers that differ from the trainer: the gap, its noise beside the clip, what each correction does."""
    _refuse_unknown_options(words)
    from legato.cli.mismatch import mismatch_command

    mismatch_command(target, words or [], kinds=kinds, prompts=prompts, output=output)


@app.command()
def doctor(
    target: Annotated[
        Path, typer.Argument(help="A run directory; or a log of TRL or another trainer: trainer_state.json, .jsonl, .csv.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SETTING=VALUE]...", help="Settings of TRL, which its log does not hold: epsilon=0.2"),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="KEY=COLUMN: which column of the log is which metric (docs/metrics.md).")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the findings as JSON.")] = None,
) -> None:
    """Explain a run in words: what went wrong, with evidence, likely causes and what to try."""
    from legato.cli.doctor import doctor_command

    doctor_command(target, words or [], columns=column or [], output=output)


@app.command()
def export(
    target: Annotated[str, typer.Argument(help="A run directory, or a recipe for its model before training.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; a new or empty folder.")],
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; else the newest.")] = None,
    merge: Annotated[bool, typer.Option("--merge/--adapter", help="LoRA merged into the weights, or as adapter.")] = True,
    allow_older: Annotated[
        bool, typer.Option("--allow-older", help="Take an older checkpoint if the newest is damaged; else that is an error.")
    ] = False,
) -> None:
    """Write a plain Hugging Face folder that AutoModelForCausalLM loads."""
    from legato.cli.commands import export_command

    export_command(target, folder, step, merge, allow_older)


@app.command()
def dashboard(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, or a run.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = False,
) -> None:
    """Show runs in a browser while they go on: curves, health, rollouts token by token, configs."""
    import webbrowser

    from legato.dashboard.app import serve

    serve(folder, port, lambda text: typer.echo(text), webbrowser.open if show else None)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run directory, or several.")],
    output: Annotated[Path, typer.Option(help="Of several runs: where the page is written.")] = Path("runs.html"),
) -> None:
    """Write report.html of a run again; of several runs one page, curves with bands over seeds and what each costs."""
    from legato.cli.commands import report_command

    report_command(runs, output)


def _refuse_unknown_options(words: list[str] | None) -> None:
    """Refuse misspelt options before the import of torch, which takes seconds."""
    from legato.config.unknown import refuse_unknown_options

    refuse_unknown_options(words or [])


def main() -> None:
    """Run the command line; bad input is one line and exit code 2, our own fault a report file and exit code 1."""
    _use_utf8()
    run_command()


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale has another encoding, such as ASCII.

    Else names of files, prompts and words that are not ASCII cannot be read, or come as fragments that no tokenizer takes.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1" and sys.executable:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def run_command() -> None:
    """Run the command that sys.argv holds, in this process."""
    with safe_output():
        _run()


def _run() -> None:
    # A shell starts background jobs with SIGINT ignored; `kill -INT` should still end a command.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # SIGUSR2 asks a run to save. Without a handler it kills, also a run that is still loading its model.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        app()
    except SystemExit as ending:
        sys.exit(_exit_code(ending.code))
    except InputError as error:
        _print_error(str(error), error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        cause = os_error_of(error)
        if cause is not None and is_of_the_disk(cause):
            where = "a file" if cause.filename is None else cause.filename
            _print_error(f"cannot read or write {where}: {reason(cause)}", error)
            sys.exit(2)
        path = _crash_report()
        _print_error(f"a fault of ours, {type(error).__name__}: {error}; please send us {path}", error)
        sys.exit(1)


def _exit_code(code: Any) -> Any:
    """The exit code of a command that came to its end; 2 if its result is what it prints and that could not be written."""
    sys.stdout.flush()
    lost = lost_output(sys.stdout)
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if code or lost is None or lost.errno == errno.EPIPE or verb not in _PRINTING:
        return code
    _print_error(f"cannot write to the standard output: {lost.strerror}")
    return 2


def _print_error(text: str, error: Exception | None = None) -> None:
    """Print a message and the notes that were added to its error. A line that quotes a huge value is cut in the middle."""
    text = "\n".join(shorten(line, _LONGEST_LINE) for line in text.splitlines())
    print("; ".join([f"legato: {text}", *getattr(error, "__notes__", ())]), file=sys.stderr)


def _crash_report() -> Path:
    """Write a report with versions, the command and the traceback, without environment variables; returns its path."""
    text = "\n".join(
        [f"legato {__version__}, Python {sys.version.split()[0]}", "command: " + " ".join(sys.argv), traceback.format_exc()]
    )
    name = f"legato-fault-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            return folder / name
        except OSError:
            continue
    print(text, file=sys.stderr)
    return Path("(nowhere: no folder is writable)")


if __name__ == "__main__":
    main()
