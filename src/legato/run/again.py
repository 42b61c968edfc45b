"""A run that left no checkpoint cannot go on; how the same run is begun again."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from legato.run.resolved import Resolved


def begin_again(directory: Path, resolved: Resolved, given: Sequence[str]) -> str:
    """What to do, in a folder of its own: one that is there is never overwritten. `given`: what came from Python."""
    if given:
        return f"begin again from Python with the same {' and '.join(given)}"
    name = resolved.config.output.name
    words = [str(directory / "config.toml")]
    words += [] if name is None else [f"output.name={unused(directory.parent, name, 2)}"]
    return f"begin again with legato train {shlex.join(words)}"


def unused(parent: Path, stem: str, number: int) -> str:
    """The stem with the first number, from the given one on, that nothing there has."""
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return f"{stem}-{number}"
