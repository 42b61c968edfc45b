"""The errors a person can do something about. Whatever else is raised is a fault of ours: a report file and exit code 1."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something that was handed in cannot be used: an option, a file, a tensor, a model folder.

    The message says what was expected, what came, where it came from, and what to do. It stands alone: the command line
    prints it without a traceback and exits with 2. A `ValueError` of Python's own (`zip(strict=True)`, `int("x")`) is none.
    """


class OtherRankError(Exception):
    """Another rank of the run cannot go on. The message names it and its error."""

    def __init__(self, message: str, *, is_input: bool, signal: int | None = None) -> None:
        super().__init__(message)
        self.is_input = is_input
        """Whether the error is the user's to correct."""
        self.signal = signal
        """The signal for which the rank gave up its step; None if it failed."""


class LostRankError(Exception):
    """A rank does not answer any more: it was killed, or its machine is gone. Nothing can be exchanged or saved."""


LOST_RANK = 4
"""The exit code of a run that ended because a rank was lost or hung."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: "did you mean ...?" when something known is close, and what is known."""
    known = list(known)
    close = difflib.get_close_matches(word.lower().replace("_", "-"), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? Known: {', '.join(known)}" if close else f"known: {', '.join(known)}"


LONGEST_TEXT = 500
"""Characters of a foreign text in a message of ours."""


def shorten(text: str, most: int = LONGEST_TEXT) -> str:
    """The text; a longer one is cut in the middle, since errors say at their end what went wrong."""
    if len(text) <= most:
        return text
    note = f" ... ({len(text)} characters) ... "
    return text[: most - most // 3] + note + text[-(most // 3) :]


def describe_error(error: BaseException) -> str:
    """Type and text of an exception, shortened. The text may come from code that raises itself."""
    try:
        return shorten(f"{type(error).__name__}: {error}")
    except BaseException as other:
        return f"{type(error).__name__}, whose text cannot be read ({type(other).__name__})"


def describe_value(value: object) -> str:
    """The repr of a value, shortened; its type if the repr cannot be read."""
    try:
        return shorten(repr(value), 200)
    except BaseException as other:
        return f"a {type(value).__name__}, whose repr cannot be read ({type(other).__name__})"
