"""How a mistake in a configuration is told: the path, the value, where it came from, what is allowed."""

from collections.abc import Sequence
from typing import Any

_LONGEST = 80


def shown(value: Any) -> str:
    """A value as a person would have written it, cut where it is long."""
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


def refused(path: Sequence[str], value: Any, origin: str, allowed: str) -> str:
    """An option with a value that it does not take."""
    return f"{'.'.join(path)}: expected {allowed}, got {shown(value)} ({origin})"
