"""Messages about faults in a configuration: the path, the value, its origin, what is allowed."""

from collections.abc import Iterable, Sequence
from typing import Any

from legato.core.slots import ONE
from legato.errors import nearest

_LONGEST = 80


def show_value(value: Any) -> str:
    """A value as a person would write it, truncated if long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = list(value)
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to print whole numbers of thousands of digits.
        text = "a number of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def refusal(path: Sequence[str], value: Any, origin: str, allowed: str) -> str:
    """The message for an option with a value that is not allowed."""
    return f"{'.'.join(path)}: expected {allowed}, got {show_value(value)} ({origin})"


def unknown_algorithm(name: str, origin: str, known: Iterable[str], missing: Sequence[str]) -> str:
    """The message for a name that no algorithm has, where slots are missing for one of the user's own."""
    return (
        f"algorithm.name ({origin}): unknown algorithm {name!r}; {nearest(name, known)}. An algorithm of"
        f" your own needs all of {', '.join(ONE)}; missing: {', '.join(missing)}"
    )
