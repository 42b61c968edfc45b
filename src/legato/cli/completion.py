"""Shell completion: recipes, option paths with their values, algorithms. Loads no torch: the shell waits for it."""

import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

from legato.cli.options import MAIN, all_paths, canonical_path, choices_of, known_names

VARIABLE = "_LEGATO_COMPLETE"
"""Set by the completion scripts of the shells, which `legato --install-completion` installs."""


def complete_argument(incomplete: str) -> list[str]:
    """Completions of an argument of `train`: a recipe, or an option with its value."""
    if "=" in incomplete:
        return complete_option(incomplete)
    return [*_recipes(incomplete), *complete_option(incomplete)]


def complete_option(incomplete: str) -> list[str]:
    """Completions of `path=value`; the values where they are a list of words."""
    path, sign, _ = incomplete.partition("=")
    if sign:
        return [f"{path}={value}" for value in choices_of(canonical_path(path))]
    # `algorithm=grpo` is the usual way to name one.
    paths = [*all_paths(), "algorithm"] if incomplete else MAIN
    matching = [each for each in paths if each.startswith(incomplete)]
    if len(matching) == 1 and choices_of(matching[0]):
        return [f"{matching[0]}={value}" for value in choices_of(matching[0])]
    return [f"{each}=" for each in matching]


def complete_name(incomplete: str) -> list[str]:
    """Completions of a name that `legato explain` knows."""
    return [*known_names(), *(all_paths() if "." in incomplete else [])]


def complete_algorithm(incomplete: str) -> list[str]:
    """Completions of an algorithm."""
    return choices_of("algorithm")


def _recipes(incomplete: str) -> Iterator[str]:
    """TOML files, and folders to look into."""
    folder, _, start = incomplete.rpartition("/")
    place = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    try:
        inside = sorted(place.iterdir())
    except OSError:
        return
    prefix = incomplete[: len(incomplete) - len(start)]
    for path in inside:
        if path.name.startswith(start) and (start.startswith(".") or not path.name.startswith(".")):
            if path.is_dir():
                yield f"{prefix}{path.name}/"
            elif path.suffix == ".toml":
                yield f"{prefix}{path.name}"


def run_with_whole_words(command: Callable[[], None]) -> None:
    """Run a completion with `path=value` as one word.

    Bash takes "=" for the end of a word: it passes `algorithm`, `=` and `gs`, and puts what is printed in place of `gs`.
    """
    if os.environ.get(VARIABLE) != "complete_bash":
        return command()
    words, place = shlex.split(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
    words += [""] * (place + 1 - len(words))
    head = place
    while head > 1 and "=" in (words[head], words[head - 1]):
        head -= 1
    before = "".join(words[head:place]) + ("=" if words[place] == "=" else "")
    whole = "".join(words[head : place + 1])
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = shlex.join([*words[:head], whole]), str(head)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            command()
    finally:
        for line in printed.getvalue().splitlines():
            sys.stdout.write(line.removeprefix(before) + "\n")
    return None
