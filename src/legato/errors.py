"""The errors a person can do something about. Whatever else is raised is a fault of ours: a report file and exit code 1."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something that was handed in cannot be used: an option, a file, a tensor, a model folder.

    The message says what was expected, what came, where it came from, and what to do. It stands alone: the command line
    prints it without a traceback and exits with 2. A `ValueError` of Python's own (`zip(strict=True)`, `int("x")`) is none.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: "did you mean ...?" when something known is close, and what is known."""
    known = list(known)
    close = difflib.get_close_matches(word.lower().replace("_", "-"), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? Known: {', '.join(known)}" if close else f"known: {', '.join(known)}"
