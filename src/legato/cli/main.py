"""`legato`: the door. Exit codes: 0 done, 1 our own fault, 2 bad input (one message, no traceback)."""

import sys
from typing import Annotated

import typer

from legato import __version__

app = typer.Typer(
    name="legato",
    help="Reinforcement learning for language models with ratio, clip and credit over the whole response.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"legato {__version__}")
        raise typer.Exit


@app.callback()
def door(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Reinforcement learning for language models with ratio, clip and credit over the whole response."""


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


def main() -> None:
    """Run the command line; bad input is one line and exit code 2."""
    try:
        app()
    except ValueError as error:
        typer.echo(f"legato: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
