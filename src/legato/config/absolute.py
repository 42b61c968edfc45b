"""Makes the paths of a configuration absolute, so that the run that stores it can go on from any directory."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from legato.config.resolved import Resolved
from legato.core.importing import is_import_path

_NAMES = ("path", "file", "folder")
"""An option of a task or a reward with such a name, or one that ends in it (`test_file`), names a file or a folder."""


def absolute_paths(resolved: Resolved, chosen: Callable[[str], bool] = lambda path: True) -> Resolved:
    """The configuration with absolute paths in place of those that lead from here to a file or a folder.

    These are user code ("file.py:Name"), files of tasks and rewards, the model folder and the cache of warm-ups. `chosen`
    tells by its dotted path whether an option may be changed. Names of the hub and anything that is not there stay.
    """
    config = _absolute_section(resolved.config, "", chosen)
    return resolved if config == resolved.config else dataclasses.replace(resolved, config=config)


def _absolute_section(section: Any, prefix: str, chosen: Callable[[str], bool]) -> Any:
    changed = {}
    for field in dataclasses.fields(section):
        path, value = prefix + field.name, getattr(section, field.name)
        if field.name == "options":
            new: Any = {name: _option(prefix + name, name, option, chosen) for name, option in value.items()}
        elif dataclasses.is_dataclass(value):
            new = _absolute_section(value, f"{path}.", chosen)
        elif isinstance(value, Mapping):
            new = {name: _inner(each, f"{path}.{name}.", chosen) for name, each in value.items()}
        elif isinstance(value, tuple):
            new = tuple(_inner(each, f"{path}.{number}.", chosen) for number, each in enumerate(value))
        else:
            new = _absolute(path, value) if isinstance(value, str) and chosen(path) else value
        if new != value:
            changed[field.name] = new
    return dataclasses.replace(section, **changed) if changed else section


def _inner(value: Any, prefix: str, chosen: Callable[[str], bool]) -> Any:
    return _absolute_section(value, prefix, chosen) if dataclasses.is_dataclass(value) else value


def _absolute(path: str, value: str) -> str:
    """The value of an option of ours."""
    if path in ("policy.model", "teacher.model"):
        folder = os.path.expanduser(value)
        return os.path.abspath(folder) if value not in ("tiny", "tiny-moe", "smollm2") and os.path.exists(folder) else value
    if path == "policy.warm_up.cache":
        return os.path.abspath(value)
    return _reference(value)


def _option(path: str, name: str, value: Any, chosen: Callable[[str], bool]) -> Any:
    """The value of an option of a task or a reward."""
    if isinstance(value, list):
        return [_option(path, name, each, chosen) for each in value]
    if not isinstance(value, str) or not chosen(path):
        return value
    # A file with an ending is meant as a file, whatever the option is called; "test" may be the name of a split.
    names_a_file = name.rpartition("_")[2] in _NAMES or (Path(value).suffix and os.path.isfile(value))
    return os.path.abspath(value) if names_a_file and os.path.exists(value) else _reference(value)


def _reference(value: str) -> str:
    """`file.py:Name` with the absolute path of the file; any other text as it is."""
    file, _, name = value.rpartition(":")
    return (
        f"{os.path.abspath(file)}:{name}"
        if is_import_path(value) and file.endswith(".py") and os.path.exists(file)
        else value
    )
