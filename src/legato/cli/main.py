"""The command line `legato`.

Exit codes: 0 done, 1 our own fault, 2 bad input or a disk that cannot be written (one message, no traceback), 3 stopped by
the health watch, 4 a rank was lost. A signal ends a run with its state saved: 129 SIGHUP, 130 SIGINT, 138 SIGUSR1, 143
SIGTERM. SIGUSR2 saves and the run goes on. A log that is closed or full changes no exit code of a verb that trains or
writes files.
"""

import errno
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from legato import __version__
from legato.cli.laboratory import lab
from legato.cli.output import safe_output
from legato.config.sources import split_words
from legato.errors import LOST_RANK, InputError, LostRankError, OtherRankError, describe_error, shorten
from legato.records.directory import check_run_folder
from legato.records.room import is_of_the_disk, os_error_of, reason
from legato.run.missing import check_log, check_target
from legato.run.watcher import lost_output

_PRINTING = (None, "explain", "eval", "sample", "doctor", "rollouts", "runs", "plan")
"""Verbs whose result is what they print (None: --help and --version); the others write files."""


class _Verbs(TyperGroup):
    """The verbs. Typer takes every BrokenPipeError for one of the standard output and ends with exit code 1 in silence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise RuntimeError(f"BrokenPipeError: {error}") from error


class _TrainHelp(TyperCommand):
    """The verb `train`, whose help also lists the main options of a run."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from legato.cli.options import print_main_options

        super().format_help(ctx, formatter)
        print_main_options()


def _complete(name: str) -> Callable[[str], list[str]]:
    """A function of `cli/completion.py`, imported when a shell asks for completions."""

    def complete(incomplete: str) -> list[str]:
        from legato.cli import completion

        completions: list[str] = getattr(completion, name)(incomplete)
        return completions

    return complete


_LONGEST_LINE = 2000
"""Of an error message, in characters."""

app = typer.Typer(
    name="legato",
    cls=_Verbs,
    help="Reinforcement learning for language models with ratio, clip and credit over the whole response.",
    no_args_is_help=True,
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
        list[str] | None,
        typer.Argument(
            help="An algorithm, a part, a task, a reward, an engine or an option; or several algorithms.",
            autocompletion=_complete("complete_name"),
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="An override as path=value, applied to every algorithm named."),
    ] = None,
) -> None:
    """Print an algorithm or a part: formula, values, what it reads, what to beware of; several: how they differ.

    Also an option (training.lr), a table of them (training), a task, a reward or an engine (jsonl, number, local).
    Without a name: all algorithms and all parts.
    """
    if names and len(names) == 1 and not change:
        from legato.cli.options import explain_stored, is_algorithm_or_part

        if explain_stored(names[0]) and not is_algorithm_or_part(names[0]):
            return
    from legato.cli.explain import explain_all, explain_one, explain_several

    if not names:
        explain_all()
    elif len(names) == 1:
        explain_one(names[0], change or [])
    else:
        explain_several(names, change or [])


@app.command(cls=_TrainHelp)
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE]... [PATH=VALUE]...",
            help="TOML files, then options.",
            autocompletion=_complete("complete_argument"),
        ),
    ] = None,
    from_trl: Annotated[
        Path | None, typer.Option(help="Start from a GRPOConfig of TRL, as JSON or YAML (docs/migrating.md).")
    ] = None,
    print_recipe: Annotated[
        bool, typer.Option("--print-recipe", help="With --from-trl: print the recipe and leave.")
    ] = False,
    resume_if_exists: Annotated[
        bool,
        typer.Option("--resume-if-exists", help="Go on with the run output.name if it is there: for requeued jobs."),
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="With --resume-if-exists: accept options that train differently.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load and check everything, print the plan; train and write nothing.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Train on so many processes of this machine, one a GPU (starts torchrun).")
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="With --processes: how often all begin again from the newest checkpoint.")
    ] = 0,
) -> None:
    """Train a model: legato train recipes/tiny.toml training.seed=1

    Without a recipe, model, task or reward: recipes/tiny.toml. Recipes of the package are found from any directory, also as
    `tiny`.
    """
    _check_arguments(arguments, whole=from_trl is None)
    _start_processes(processes, restarts)
    translation = _translate_trl(from_trl, print_recipe, arguments or [])
    from legato.cli.commands import train_command

    raise typer.Exit(
        train_command(
            arguments or [],
            translation,
            resume_if_exists=resume_if_exists,
            allow_changes=allow_changes,
            dry_run=dry_run,
        )
    )


@app.command()
def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [RECIPE]... [PATH=VALUE]...",
            help="A shipped configuration (qwen3-8b), a model folder or a config.json; TOML files; options.",
            autocompletion=_complete("complete_argument"),
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs.")] = 1,
    hardware: Annotated[str, typer.Option(help="h200, h100, a100 or b200.")] = "h200",
    memory: Annotated[float | None, typer.Option(help="Usable GiB of each GPU, if it has more or less.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Mean length of prompts, for the times; else the limit of the recipe.")
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option(help="Mean length of responses, for the times; else the limit of the recipe.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="All shipped models on 1, 8, 64 and 512 GPUs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run needs before it runs: legato plan qwen3-8b recipes/qwen3-0.6b-gsm8k.toml --gpus 8

    Memory per GPU by part, whether it fits, what to change so that it does, and the time of a step. No weights and no GPU
    are needed. Without a recipe: recipes/qwen3-0.6b-gsm8k.toml.
    """
    words = arguments or []
    _check_arguments(
        [word for word in words if word.endswith(".toml") or ("=" in word and not word.startswith("training.shard="))],
        whole=False,
    )
    from legato.cli.plan import plan_command

    plan_command(
        words,
        gpus=gpus,
        hardware=hardware,
        memory=memory,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        table=table,
        as_json=as_json,
    )


@app.command()
def new(name: Annotated[str, typer.Argument(help="The folder to write.")]) -> None:
    """Write a folder to start from: a commented recipe, problems and a reward, which train at once."""
    from legato.cli.new import new_command

    new_command(name)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH=VALUE]...", help="Options to change.", autocompletion=_complete("complete_option")),
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Allow changes of the training (docs/resume.md).")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Go back to the checkpoint of this step; later records move to RUN/given-up.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Go on with so many processes of this machine, one a GPU (starts torchrun).")
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="With --processes: how often all begin again from the newest checkpoint.")
    ] = 0,
) -> None:
    """Continue a run from its newest whole checkpoint, or from an earlier one."""
    check_run_folder(run)
    _check_arguments(words, whole=False)
    _start_processes(processes, restarts)
    from legato.cli.commands import resume_command

    raise typer.Exit(resume_command(run, words or [], allow_changes, step))


@app.command()
def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]... [PATH=VALUE]...",
            help="A comparison file, or recipes; options of every arm.",
            autocompletion=_complete("complete_argument"),
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="An algorithm, or 'NAME PATH=VALUE ...'. The first is what the others are compared with.",
            autocompletion=_complete("complete_algorithm"),
        ),
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
    drop_checkpoints: Annotated[
        bool, typer.Option("--drop-checkpoints", help="Write no checkpoint at the end; remove others when a run has ended.")
    ] = False,
) -> None:
    """Compare arms over seeds: legato compare recipes/tiny.toml --arm grpo --arm gspo --seeds 0-4

    The same command again goes on where it was stopped.
    """
    # A file may be that of a comparison, which has other tables.
    _check_arguments([word for word in arguments or [] if "=" in word and not word.endswith(".toml")], whole=False)
    from legato.compare.definition import from_arguments

    definition = from_arguments(arguments or [], arms=arm or [], seeds=seeds, sweep=sweep or [], unequal=unequal)
    for each in arm or []:
        name, *words = shlex.split(each)
        try:
            _check_arguments(words, whole=False)
        except InputError as error:
            raise InputError("\n".join(f"arm {name}: {line}" for line in str(error).splitlines())) from None
    from legato.cli.comparison import compare_command

    code = compare_command(
        definition,
        parallel=parallel,
        gpus=gpus,
        out=out,
        retry_failed=retry_failed,
        keep_checkpoints=not drop_checkpoints,
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
    seeds: Annotated[str | None, typer.Option(help="Run these seeds of the study, as in 200-203.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="After so long no further run begins; 0 runs nothing and shows what is there."),
    ] = None,
    finished: Annotated[
        list[Path] | None, typer.Option("--import", help="Runs made on another machine: files of --export, or a folder.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="A file (.json.gz) for the seeds that were run to their end here.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what failed before.")] = False,
    drop_checkpoints: Annotated[
        bool, typer.Option("--drop-checkpoints", help="Write no checkpoint at the end; remove others when a run has ended.")
    ] = False,
) -> None:
    """Run a registered study: legato study studies/frontier.toml --gpus 0 --parallel 16

    The same command again goes on where it was stopped. Nothing is compared before the last run has ended.
    """
    from legato.cli.study import study_command

    code = study_command(
        file,
        parallel=parallel,
        gpus=gpus,
        out=out,
        pilot=pilot,
        only=only,
        seeds=seeds,
        minutes=minutes,
        finished=finished or [],
        export=export,
        retry_failed=retry_failed,
        keep_checkpoints=not drop_checkpoints,
    )
    raise typer.Exit(code)


@app.command("eval")
def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET... [PATH=VALUE]...", help="Run directories, recipes, or models (folder or name); then options."
        ),
    ],
    sets: Annotated[
        str | None,
        typer.Option(help="Evaluate these sets only: a recipe with evaluation.sets, or names as aime-24,math-500."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; else the newest.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Responses per problem: avg@n and pass@k.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy/--no-greedy", help="Greedy accuracy too.")] = True,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Temperature of the sampled responses; 0: greedy.")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="How many problems.")] = None,
    file: Annotated[Path | None, typer.Option(help="Problems from a JSONL or Parquet file (prompt, answer).")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    server: Annotated[
        str | None, typer.Option(help="Sample at this `legato serve` (http://...), whose key is in $LEGATO_SERVER_KEY.")
    ] = None,
) -> None:
    """Measure accuracy on held-out problems and on evaluation sets: greedy, avg@n and pass@k with 95 % intervals.

    Several targets are measured on the sets alone and shown side by side.
    """
    recipe = [sets] if sets is not None and sets.endswith(".toml") else []
    _check_arguments([*recipe, *(word for word in arguments if "=" in word)], whole=False)
    for target in split_words(arguments)[0]:
        check_target(target)
    from legato.cli.commands import eval_command

    eval_command(
        arguments,
        number_of_samples=samples,
        greedy=greedy,
        temperature=temperature,
        problems=problems,
        file=file,
        output=output,
        step=step,
        sets=sets,
        server=server,
    )


@app.command()
def sample(
    target: Annotated[str, typer.Argument(help="A run directory, a recipe, or a model (folder or name).")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none: read from the terminal.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with a prompt per line.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0: greedy.")] = None,
    max_response_tokens: Annotated[int | None, typer.Option(min=1, help="The longest response.")] = None,
    server: Annotated[
        str | None, typer.Option(help="Sample at this `legato serve` (http://...), whose key is in $LEGATO_SERVER_KEY.")
    ] = None,
) -> None:
    """Sample responses to prompts."""
    check_target(target)
    from legato.cli.commands import sample_command

    sample_command(
        target,
        prompts or [],
        file=file,
        number_of_samples=samples,
        temperature=temperature,
        max_response_tokens=max_response_tokens,
        server=server,
    )


@app.command()
def serve(
    target: Annotated[str, typer.Argument(help="A run directory, a recipe, or a model (folder or name).")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH=VALUE]...", help="Options.", autocompletion=_complete("complete_option")),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; else the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Take over each new checkpoint of a running run.")] = False,
    follow_seconds: Annotated[float, typer.Option(min=0.1, help="With --follow: how often to look.")] = 5.0,
    host: Annotated[str, typer.Option(help="Where to listen; anything but loopback is open to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    key: Annotated[str | None, typer.Option(help="The key of clients; else $LEGATO_SERVER_KEY, else a random one.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="The most tokens of a prompt with its response.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of a response if the request does not say.")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="The most responses in flight; more get 429.")] = None,
) -> None:
    """Serve a model or a run over HTTP: OpenAI's endpoints and vLLM's, with a key (docs/serve.md)."""
    _check_arguments(words, whole=False)
    check_target(target)
    from legato.cli.serve import serve_command

    serve_command(
        target,
        words or [],
        step=step,
        host=host,
        port=port,
        key=key,
        name=name,
        follow=follow_seconds if follow else None,
        context=context,
        max_tokens=max_tokens,
        max_requests=max_requests,
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
    _check_arguments(words, whole=False)
    check_target(target)
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
    check_log(target)
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
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; else 16 bits if the trained model is published so.")
    ] = None,
) -> None:
    """Write a plain Hugging Face folder that AutoModelForCausalLM loads."""
    check_target(target)
    from legato.cli.commands import export_command

    export_command(target, folder, step, merge, allow_older, dtype)


@app.command()
def rollouts(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="A step with stored rollouts; else the last.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many samples.")] = 3,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest rewards.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest rewards.")] = False,
) -> None:
    """Show whole samples of a run: prompt (the last turn of the user), response and score."""
    from legato.cli.rollouts import rollouts_command

    if best and worst:
        raise InputError("expected --best or --worst, got both")
    rollouts_command(run, step=step, most=count, order="best" if best else "worst" if worst else None)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, or a run.")] = Path("runs"),
    prune: Annotated[
        bool, typer.Option("--prune", help="List what can be made again (old checkpoints, reports) and remove it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove without asking.")] = False,
) -> None:
    """List runs: state, step, best score, size on disk. With --prune, remove what can be made again."""
    from legato.cli.runs import runs_command

    runs_command(folder, prune=prune, yes=yes)


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
    for run in runs:
        check_run_folder(run)
    from legato.cli.commands import report_command

    report_command(runs, output)


def _start_processes(processes: int | None, restarts: int) -> None:
    """Become torchrun, which starts this command once per process; returns if one process is wanted."""
    if processes is None:
        if restarts:
            raise InputError("expected --processes beside --restarts, got none; torchrun restarts what it has started")
        return
    from legato.cli.processes import start_processes

    start_processes(processes, restarts)


def _translate_trl(path: Path | None, print_recipe: bool, arguments: list[str]) -> Any:
    """The translation of a configuration of TRL, before the import of torch; printed as a recipe if that is wanted."""
    from legato.config.from_trl import read_trl

    if path is None:
        if print_recipe:
            raise InputError("expected --from-trl FILE beside --print-recipe, got none; name the file of TRL")
        return None
    translation = read_trl(path)
    if not print_recipe:
        return translation
    files, words = split_words(arguments)
    if files:
        raise InputError(f"expected options beside --print-recipe, got the recipe {files[0]}; leave it out")
    typer.echo(translation.recipe(words), nl=False)
    raise typer.Exit


def _check_arguments(words: list[str] | None, *, whole: bool = True) -> None:
    """Refuse mistakes in recipes and options before the import of torch, which takes seconds."""
    from legato.config.quick import check_arguments

    check_arguments(words or [], whole=whole)


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
        if "_LEGATO_COMPLETE" in os.environ:
            from legato.cli.completion import run_with_whole_words

            run_with_whole_words(lambda: app(prog_name="legato"))
        else:
            app()
    except SystemExit as ending:
        sys.exit(_exit_code(ending.code))
    except InputError as error:
        if _is_shown_here(error):
            _print_error(f"{_name_of_rank()}{error}", error)
        sys.exit(2)
    except OtherRankError as error:
        if _rank() == 0:
            _print_error(str(error), error)
        sys.exit(128 + error.signal if error.signal else 2 if error.is_input else 1)
    except LostRankError as error:
        # Where rank 0 itself is gone, its neighbour says so.
        if _rank() == 0 or (_rank() == 1 and "rank 0 " in str(error)):
            _print_error(f"{error}; all ranks end", error)
        sys.exit(LOST_RANK)
    except BaseException as error:
        from legato.core.importing import place_in_own_code

        place = place_in_own_code(error)
        if place is not None:
            _print_error(f"expected code that returns, got {describe_error(error)} ({place}); correct it", error)
            sys.exit(2)
        if isinstance(error, KeyboardInterrupt):
            sys.exit(130)
        if not isinstance(error, Exception):
            raise
        cause = os_error_of(error)
        if cause is not None and is_of_the_disk(cause):
            where = "a file" if cause.filename is None else cause.filename
            _print_error(f"cannot read or write {where}: {reason(cause)}", error)
            sys.exit(2)
        if "torch" in sys.modules:
            from legato.core.out_of_memory import explain_out_of_memory, is_out_of_memory

            if is_out_of_memory(error):
                if _is_shown_here(error):
                    _print_error(f"{_name_of_rank()}{explain_out_of_memory(error)}", error)
                sys.exit(2)
        path = _crash_report()
        if _is_shown_here(error):
            _print_error(f"{_name_of_rank()}a fault of ours, {type(error).__name__}: {error}; please send us {path}", error)
        else:
            # Rank 0 shows the error; the report lies where this rank ran.
            _print_error(f"a fault of ours on rank {_rank()}; please send us {path}")
        sys.exit(1)


def _rank() -> int:
    """The rank of this process if torchrun started it, else 0."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def _name_of_rank() -> str:
    """The beginning of a message that another rank than the first shows itself."""
    return f"rank {_rank()}: " if _rank() else ""


_PRECEDENCE_SECONDS = 2.0
"""How long ranks let the first one of their machine show an error that came before they had joined."""


def _is_shown_here(error: Exception) -> bool:
    """Whether this process prints an error: rank 0 what the ranks told each other, before that one rank a machine."""
    if hasattr(error, "told_to_rank_0"):
        return not error.told_to_rank_0
    local = os.environ.get("LOCAL_RANK", "0")
    if _rank() and local.isdigit():
        # The first rank of this machine mostly meets the same error and shows it; torchrun then ends this process. If this
        # process goes on, it is the only one that knows. Later ranks wait longer, so that one of them speaks.
        time.sleep(_PRECEDENCE_SECONDS * min(int(local), 1) + 0.3 * int(local))
    return True


def _exit_code(code: Any) -> Any:
    """The exit code of a command that came to its end; 2 if its result is what it prints and that could not be written."""
    sys.stdout.flush()
    lost = lost_output(sys.stdout)
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if code or lost is None or lost.errno == errno.EPIPE or verb not in _PRINTING:
        return code
    _print_error(f"cannot write to the standard output: {lost.strerror}")
    return 2


def _print_error(text: str, error: BaseException | None = None) -> None:
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
