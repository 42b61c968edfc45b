"""Math-Verify as it runs in a worker (`workers/pool.py`). The calling process imports none of it."""

from functools import lru_cache
from typing import Any

_MARKED = ("$", r"\boxed", r"\(", r"\[")


def prepare() -> None:
    """Import Math-Verify, build its parser, and silence its warning about a missing time limit: the caller has one."""
    import logging

    logging.disable(logging.CRITICAL)
    compare("1", "$1$")


@lru_cache(maxsize=256)
def _read_gold(gold: str) -> tuple[Any, ...]:
    """Parse the answer of the data set, cached because a group shares it. Bare TeX is boxed, or parts would not be read."""
    marked = any(mark in gold for mark in _MARKED)
    return _read(gold if marked else rf"\boxed{{{gold}}}")


def _read(text: str) -> tuple[Any, ...]:
    from math_verify import parse  # type: ignore[import-untyped, unused-ignore]

    try:
        # Its own time limit is a signal, which fails off the main thread and cuts long answers. The caller kills instead.
        return tuple(parse(text, parsing_timeout=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        return ()


def compare(gold: str, response: str) -> str:
    """'right', 'wrong', or 'gold' if the answer of the data set cannot be read as mathematics."""
    answers = _read_gold(gold)
    if all(isinstance(parsed, str) for parsed in answers):
        return "gold"
    responses = _read(response)
    return "right" if any(_equal(one, other) for one in answers for other in responses) else "wrong"


def _equal(answer: Any, response: Any) -> bool:
    from math_verify import verify

    try:
        return bool(verify(answer, response, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        # Things that cannot be compared, such as a matrix and an interval, are not equal.
        return False
