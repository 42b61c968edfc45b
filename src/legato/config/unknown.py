"""The message about an option that does not exist: it suggests the one that was probably meant."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from legato.config.locate import Path
from legato.config.names import SECTIONS
from legato.config.peers import VERL, describe_key, find_key, is_verl_section
from legato.config.sources import Layer
from legato.errors import nearest


def unknown_options(path: Path, value: Any, layer: Layer, siblings: Sequence[str]) -> Iterator[str]:
    """The messages about an option or a table that does not exist; of a table of another trainer a line for each option."""
    foreign = is_verl_section(path[0]) or any(find_key(leaf) is not None for leaf in _leaves(value, path))
    if isinstance(value, dict) and value and foreign:
        for name, inner in value.items():
            yield from unknown_options((*path, name), inner, layer, siblings)
    else:
        yield unknown_option(path, layer.origin(path), siblings)


def unknown_option(path: Path, origin: str, siblings: Sequence[str]) -> str:
    """The message about an option that does not exist. It suggests the option behind a name of TRL or verl, the same name in
    another section, or the nearest sibling."""
    name, key = path[-1], find_key(path)
    elsewhere = [f"{outer}.{name}" for outer in SECTIONS[""] if name in SECTIONS.get(outer, ())]
    if key is not None:
        own, section = key[2], ".".join(path[:-1])
        if key[0] == "TRL" and section and own.ours.startswith(f"{section}."):
            own = replace(own, ours=own.ours.removeprefix(f"{section}."))
        suggestion = describe_key(*key[:2], own)
        if section and siblings and key[0] == "TRL":
            suggestion += f" Known here: {', '.join(siblings)}"
    elif is_verl_section(path[0]):
        suggestion = "it is an option of verl without a known counterpart; docs/migrating.md lists those that have one"
    elif elsewhere:
        suggestion = f"did you mean {elsewhere[0]!r}? Known here: {', '.join(siblings)}"
    else:
        suggestion = nearest(name, siblings)
    return f"{'.'.join(path)} ({origin}) does not exist; {suggestion}"


def verl_options(layer: Layer) -> Iterator[str]:
    """The messages about options of verl in tables that also hold options of parts: algorithm.adv_estimator."""
    for table in ("algorithm", "reward"):
        for path in _leaves(layer.tree.get(table), (table,)):
            if ".".join(path) in VERL:
                yield unknown_option(path, layer.origin(path), ())


def _leaves(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path
