"""A reward of the user's own, by where it is: "module:name", or "file.py:name" seen from the working directory.

This runs the code of that module, as importing does.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from legato.core.parts import nearest
from legato.rewards.scoring import Reward


def import_reward(path: str) -> Reward:
    """The reward at a path. Of a class an instance is made; it must need no arguments for that."""
    place, _, name = path.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(f"reward {path!r}: 'module:name' or 'file.py:name' is needed")
    module = _module(place, path)
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_") and callable(getattr(module, word))]
        raise ValueError(f"reward {path!r}: {place} has no {name!r}; {nearest(name, sorted(known))}")
    found = getattr(module, name)
    if inspect.isclass(found):
        found = _instance(found, path)
    if not callable(found):
        raise ValueError(f"reward {path!r}: is a {type(found).__name__}; a function of one rollout is needed")
    _check_signature(found, path)
    return found  # type: ignore[no-any-return]


def _module(place: str, path: str) -> ModuleType:
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"reward {path!r}: there is no file {file}")
    _also_search(Path.cwd() if file is None else file.parent)
    try:
        return import_module(place) if file is None else _module_of_file(file)
    except (Exception, SystemExit) as error:  # its code may raise anything, and a script may end the process
        raise ValueError(f"reward {path!r}: {place} could not be imported: {type(error).__name__}: {error}") from error


def _module_of_file(file: Path) -> ModuleType:
    # A name of its own: a file called math.py must not become the module `math`. The same file is loaded once.
    name = f"legato_reward_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _also_search(folder: Path) -> None:
    # Last, so that no file lying there takes the place of an installed package.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _instance(found: type, path: str) -> Any:
    try:
        return found()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward {path!r}: {found.__name__}() could not be made without arguments: {reason}") from error


def _check_signature(reward: Callable[..., Any], path: str) -> None:
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):
        # Some builtins have none; calling it will tell.
        return
    try:
        signature.bind(object())
    except TypeError:
        raise ValueError(f"reward {path!r}: takes {signature}; one positional argument, the rollout, is needed") from None
