"""Math-Verify as it runs in a worker (`workers/pool.py`). Nothing of this is imported by the process that asks."""

from functools import lru_cache
from typing import Any

_MARKED = ("$", r"\boxed", r"\(", r"\[")


def prepare() -> None:
    """Import it, build its parser, and keep it quiet: its warning that nobody limits the time is answered by our limit."""
    import logging

    logging.disable(logging.CRITICAL)
    compare("1", "$1$")


@lru_cache(maxsize=256)
def _read_gold(gold: str) -> tuple[Any, ...]:
    """The answer of the data set; the rollouts of a group share it. Bare TeX is boxed, or half of it would go unread."""
    marked = any(mark in gold for mark in _MARKED)
    return _read(gold if marked else rf"\boxed{{{gold}}}")


def _read(text: str) -> tuple[Any, ...]:
    from math_verify import parse  # type: ignore[import-untyped, unused-ignore]

    try:
        # Its own limit is an alarm signal, which fails off the main thread and cuts long answers; the asker kills instead.
        return tuple(parse(text, parsing_timeout=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        return ()


def compare(gold: str, response: str) -> str:
    """'right', 'wrong', or 'gold' where it is the answer of the data set that cannot be read as mathematics."""
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
        # Two things that cannot be compared are not equal: a matrix and an interval.
        return False
