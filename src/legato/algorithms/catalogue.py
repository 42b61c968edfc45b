"""The register of named algorithms: each is a function that builds a value, with its formula in its docstring."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from legato.algorithms.algorithm import Algorithm
from legato.core.parts import nearest
from legato.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A named algorithm and what there is to say about it."""

    value: Algorithm
    title: str
    formula: str
    remarks: str
    paper: str
    cautions: tuple[str, ...]
    verified: bool
    """False where a constant or a form could not be checked against its source."""


_ENTRIES: dict[str, Entry] = {}


def named(
    *, paper: str, cautions: tuple[str, ...] = (), verified: bool = True
) -> Callable[[Callable[[], Algorithm]], Callable[[], Algorithm]]:
    """Register a builder. Its docstring is: title, blank line, formula, blank line, remarks (optional)."""

    def register(build: Callable[[], Algorithm]) -> Callable[[], Algorithm]:
        value = build()
        title, formula, *remarks = inspect.cleandoc(build.__doc__ or "").split("\n\n")
        _ENTRIES[value.name] = Entry(
            value=value,
            title=title.rstrip("."),
            formula=formula,
            remarks=" ".join(" ".join(remarks).split()),
            paper=paper,
            cautions=cautions,
            verified=verified,
        )
        return build

    return register


def algorithm_names() -> list[str]:
    """All names, in the order of the tables."""
    return list(_ENTRIES)


def entry(name: str) -> Entry:
    """The named algorithm with its formula, paper and cautions."""
    if name not in _ENTRIES:
        raise InputError(f"unknown algorithm {name!r}; {nearest(name, _ENTRIES)}")
    return _ENTRIES[name]
