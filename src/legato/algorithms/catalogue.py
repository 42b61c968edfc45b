"""The named algorithms: each is a function that builds a value, with its formula in its docstring."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from legato.algorithms.algorithm import Algorithm
from legato.core.parts import nearest, register, registry_of
from legato.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A named algorithm with its documentation."""

    value: Algorithm
    title: str
    formula: str
    remarks: str
    paper: str
    cautions: tuple[str, ...]
    verified: bool
    """False where a constant or a form could not be checked against its source."""


def register_algorithm(
    *, paper: str, cautions: tuple[str, ...] = (), verified: bool = True
) -> Callable[[Callable[[], Algorithm]], Callable[[], Algorithm]]:
    """Register a builder. Its docstring is: title, blank line, formula, blank line, remarks (optional)."""

    def enter(build: Callable[[], Algorithm]) -> Callable[[], Algorithm]:
        value = build()
        title, formula, *remarks = inspect.cleandoc(build.__doc__ or "").split("\n\n")
        entry = Entry(
            value=value,
            title=title.rstrip("."),
            formula=formula,
            remarks=" ".join(" ".join(remarks).split()),
            paper=paper,
            cautions=cautions,
            verified=verified,
        )
        register("algorithm", value.name, entry, home=build)
        return build

    return enter


def algorithm_names() -> list[str]:
    """All names, in the order of the tables."""
    return list(registry_of("algorithm"))


def entry(name: str) -> Entry:
    """The named algorithm with its formula, paper and cautions."""
    if not is_published(name):
        raise InputError(f"unknown algorithm {name!r}; {nearest(name, algorithm_names())}")
    return registry_of("algorithm")[name]  # type: ignore[no-any-return]


def is_published(name: str) -> bool:
    """Whether a named algorithm has this name. An algorithm built in Python may have any other."""
    return name in registry_of("algorithm")
