"""Code of the user's by its path: "module:name" or "file.py:name", for rewards and tasks alike."""

import functools
import hashlib
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from legato.core.parts import nearest
from legato.errors import InputError


def import_object(what: str, path: str, options: Mapping[str, Any] | None = None) -> Any:
    """What stands at a path. Of a class an instance is made, with the options; a function gets them as keywords."""
    place, _, name = path.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"{what} {path!r}: 'module:name' or 'file.py:name' is needed")
    module = _module(what, place, path)
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_") and callable(getattr(module, word))]
        raise InputError(f"{what} {path!r}: {place} has no {name!r}; {nearest(name, sorted(known))}")
    found = getattr(module, name)
    if isinstance(found, type):
        return _instance(what, found, path, options or {})
    if options and not callable(found):
        raise InputError(f"{what} {path!r} takes no options, but {', '.join(options)} is given")
    return functools.partial(found, **options) if options else found


def _module(what: str, place: str, path: str) -> ModuleType:
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise InputError(f"{what} {path!r}: there is no file {file}")
    _also_search(Path.cwd() if file is None else file.parent)
    try:
        return import_module(place) if file is None else _module_of_file(file)
    except (Exception, SystemExit) as error:  # its code may raise anything, and a script may end the process
        raise InputError(f"{what} {path!r}: {place} could not be imported: {type(error).__name__}: {error}") from error


def _module_of_file(file: Path) -> ModuleType:
    # A name of its own: a file called math.py must not become the module `math`. The same file is loaded once.
    name = f"legato_own_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
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


def _instance(what: str, found: type, path: str, options: Mapping[str, Any]) -> Any:
    try:
        return found(**options)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        made = f"with {dict(options)}" if options else "without arguments"
        raise InputError(f"{what} {path!r}: {found.__name__}() could not be made {made}: {reason}") from error
