"""`legato lab`: the commands of the laboratory."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # `legato --help` loads nothing
    from legato.pages.experiment import Account

lab = typer.Typer(
    help="Experiments of the literature on your own model and task: data, figures and a page each.", no_args_is_help=True
)

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TARGET] [PATH=VALUE]...", help="A recipe, a run directory or a model; none: a tiny model."),
]
Out = Annotated[Path | None, typer.Option(help="The folder to write to; else lab/NAME.")]
Png = Annotated[bool, typer.Option("--png/--no-png", help="Figures as PNG too, where a tool for that is found.")]


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _write_account(account: "Account", out: Path | None, png: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from legato.cli.tables import show_table
    from legato.pages.experiment import write
    from legato.pages.legible import legible

    files = write(out or Path("lab") / account.name, account, png=png)
    console = Console(highlight=False)
    for sentence in account.sentences:
        console.print(Text(legible(sentence, one_line=True)), soft_wrap=True)
    checks = account.check_table()
    for each in [checks] if checks is not None else account.tables()[:1]:
        console.print()
        show_table(console, each.title, each.headings, each.rows)
    folders = f"{files[0].parent / 'tables'}, {files[0].parent / 'figures'}"
    console.print(Text(f"\npage       {files[0]}\ndata       {files[2]}, {folders}"), soft_wrap=True)


@lab.command()
def equivalence(
    words: Words = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training; 285 with 4 updates each are 1,140.")] = None,
    out: Out = None,
    png: Png = True,
) -> None:
    """s = PPL_old / PPL_new = exp(delta H): its errors, what breaks it, and perplexity over a run of 1,140 updates."""
    from legato.lab import equivalence as experiment
    from legato.lab.recorder import target_of

    target = target_of(words or [])
    _write_account(experiment.equivalence(target, steps=steps or experiment.STEPS, say=_say), out, png)


@lab.command()
def variance(
    words: Words = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training to look at; without it 40.")] = None,
    responses: Annotated[int, typer.Option(min=100, help="Of each length in the synthetic study.")] = 4000,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="The synthetic study alone.")] = False,
    out: Out = None,
    png: Png = True,
) -> None:
    """Var(log s) against length: slope, gap, which explanation fits; and the synthetic study of correlation."""
    from legato.lab import variance as experiment
    from legato.lab.recorder import target_of

    target = None if synthetic else target_of(words or [])
    _write_account(experiment.variance(target, steps=steps or experiment.STEPS, rows=responses, say=_say), out, png)


@lab.command()
def walkthrough(
    run: Annotated[Path | None, typer.Argument(help="A run directory; none: the worked examples.")] = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="[PATH=VALUE]...", help="Options.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Of the run; none: the one after its newest checkpoint.")] = None,
    rollout: Annotated[int | None, typer.Option(min=0, help="Of the step; none: one that moved far.")] = None,
    out: Out = None,
    png: Png = True,
) -> None:
    """One response through GRPO and GSPO, token by token: worked examples, or any rollout of a run."""
    from legato.lab import walkthrough as experiment

    if run is None:
        account = experiment.examples()
    else:
        account = experiment.walk_run(run, step=step, rollout=rollout, words=words or [], say=_say)
    _write_account(account, out, png)


@lab.command()
def failure(
    words: Words = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each way to train; without it 4.")] = None,
    constructed: Annotated[bool, typer.Option("--constructed", help="The constructions alone, without a model.")] = False,
    out: Out = None,
    png: Png = True,
) -> None:
    """Lengths, hidden shifts, correlated tokens, large policy shifts, heavy tails: constructed, and in your model."""
    from legato.lab import failure as experiment
    from legato.lab.recorder import target_of

    target = None if constructed else target_of(words or [])
    _write_account(experiment.failure(target, steps=steps or experiment.STEPS, say=_say), out, png)


@lab.command()
def clipping(
    words: Words = None,
    epsilons: Annotated[
        str | None, typer.Option(help="Half-widths to sweep, as in 1e-4,1e-3; without it ten from 1e-6 to 0.2.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="As in 0,1,2 or 0-4.")] = "0",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run; without it the recipe's.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    out: Out = None,
    png: Png = True,
) -> None:
    """The width of the clip from 1e-6 to 0.2: measured and predicted share, reward, drift, lengths, updates.

    The same command again goes on where it was stopped.
    """
    from legato.compare.definition import read_seeds
    from legato.lab import clipping as experiment
    from legato.lab.sweep import EPSILONS, read_epsilons

    folder = out or Path("lab") / "clipping"
    account = experiment.clipping(
        words or [],
        epsilons=EPSILONS if epsilons is None else read_epsilons(epsilons),
        seeds=read_seeds(seeds),
        steps=steps,
        folder=folder,
        parallel=parallel,
        say=_say,
    )
    _write_account(account, folder, png)
