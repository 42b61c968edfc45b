"""Importing the user's code by path, "module:name" or "file.py:name": parts, tasks, rewards and engines."""

import functools
import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from legato.core.user_code import DEFAULT_SECONDS, CallFailedError, UserCode
from legato.errors import InputError, nearest

_IMPORT_PATH = re.compile(r"(?:[^\W\d]\w*(?:\.[^\W\d]\w*)*|.*\.py):[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_OWN = "legato_own_"
_HASH = "__legato_sha256__"
IMPORT_SECONDS = DEFAULT_SECONDS
"""How long a file may take to be imported, or a class to be made: it may load a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCode:
    """A class or function of the user: its name in a configuration, and the file that defines it."""

    reference: str
    file: str
    """The absolute path."""
    sha256: str
    """The hash of the file as it was loaded."""


def is_import_path(reference: str) -> bool:
    """Whether a reference is "module:name" or "file.py:name" and not a registered name. Nothing is imported."""
    return _IMPORT_PATH.fullmatch(reference) is not None


def import_object(what: str, path: str) -> Any:
    """The class, function or value at an import path; `what` begins the error messages."""
    place, _, name = path.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"{what} {path!r}: 'module:name' or 'file.py:name' is needed")
    module = _module(what, place, path)
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_") and callable(getattr(module, word))]
        raise InputError(f"{what} {path!r}: {place} has no {name!r}; {nearest(name, sorted(known))}")
    return getattr(module, name)


def make_imported(what: str, path: str, options: Mapping[str, Any] | None = None) -> Any:
    """The object at an import path with options: a class is called with them, a function gets them as keywords."""
    thing = import_object(what, path)
    if isinstance(thing, type):
        return _instance(what, thing, path, options or {})
    if options and not callable(thing):
        raise InputError(f"{what} {path!r} takes no options, but {', '.join(options)} is given")
    return functools.partial(thing, **options) if options else thing


def source_file(module: ModuleType | None) -> Path | None:
    """The file of a module; None for a notebook, an interactive session and modules written in C."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return Path(file).resolve() if isinstance(file, str) else None


def reference_to(thing: Any) -> str:
    """The path of a class or function: "file.py:Name" for a single file, relative where it lies below the current
    directory; "module:Name" for a package."""
    module = sys.modules.get(thing.__module__)
    file = source_file(module)
    if file is None or not _is_single_file(thing.__module__, file):
        return f"{thing.__module__}:{thing.__qualname__}"
    here = Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{thing.__qualname__}"


def own_code(thing: Any) -> OwnCode:
    """The file of a class or function. One that no other process could import is refused."""
    file = source_file(sys.modules.get(thing.__module__))
    if thing.__module__ == "__main__" or file is None or "." in thing.__qualname__:
        raise InputError(
            f"expected a class or function that a resumed run can import, got {thing.__module__}.{thing.__qualname__}, which"
            " is defined in a notebook, in the script itself or inside a function; put it at the top level of a file of its"
            " own, my_parts.py, and import it from there, or name it as 'my_parts.py:Name'"
        )
    return OwnCode(reference=reference_to(thing), file=str(file), sha256=_sha256_of(sys.modules[thing.__module__], file))


def code_at(what: str, path: str) -> OwnCode | None:
    """The user's file behind an import path; None where the path leads into an installed package or into Legato."""
    module = _module(what, path.rpartition(":")[0], path)
    file = source_file(module)
    if file is None or module.__name__.partition(".")[0] == "legato" or "site-packages" in file.parts:
        return None
    return OwnCode(reference=path, file=str(file), sha256=_sha256_of(module, file))


def _is_single_file(module: str, file: Path) -> bool:
    """Whether loading the file alone gives the module: no package, not installed, not the script that runs."""
    alone = "." not in module and module != "__main__" and file.name != "__init__.py"
    return alone and file.suffix == ".py" and "site-packages" not in file.parts


def _sha256_of(module: ModuleType, file: Path) -> str:
    recorded = vars(module).get(_HASH)
    return recorded if isinstance(recorded, str) else hashlib.sha256(file.read_bytes()).hexdigest()


def _module(what: str, place: str, path: str) -> ModuleType:
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise InputError(f"{what} {path!r}: there is no file {file}")
    _also_search(Path.cwd() if file is None else file.parent)
    loaded = sys.modules.get(place) if file is None else None
    if loaded is not None:
        return loaded
    with UserCode(f"the import of {place}", IMPORT_SECONDS) as code:
        try:
            return code.call(import_module, place) if file is None else code.call(_module_of_file, file)
        except CallFailedError as error:
            raise InputError(f"{what} {path!r}: {place} could not be imported: {error}") from error.__cause__


def _module_of_file(file: Path) -> ModuleType:
    """The module of a file, loaded once; again when the file has changed."""
    # A name of its own: a file called math.py must not become the module `math`.
    name = f"{_OWN}{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    text = file.read_bytes()
    sha256 = hashlib.sha256(text).hexdigest()
    loaded = sys.modules.get(name) or _imported_as_module(file)
    if loaded is not None and vars(loaded).get(_HASH, sha256) == sha256:
        return loaded
    spec = spec_from_file_location(name, file)
    assert spec is not None
    module = module_from_spec(spec)
    vars(module)[_HASH] = sha256
    before, sys.modules[name] = sys.modules.get(name), module
    try:
        # Run the bytes that were hashed. A bytecode cache may still hold an earlier version.
        exec(compile(text, str(file), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _imported_as_module(file: Path) -> ModuleType | None:
    """The module that an `import` statement loaded from the same file: its classes must not exist twice."""
    others = [module for name, module in list(sys.modules.items()) if name != "__main__"]
    return next((module for module in others if getattr(module, "__dict__", {}).get("__file__") == str(file)), None)


def _also_search(folder: Path) -> None:
    # Appended, so that no file in the folder hides an installed package.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _instance(what: str, cls: type, path: str, options: Mapping[str, Any]) -> Any:
    with UserCode(f"{cls.__name__}()", IMPORT_SECONDS) as code:
        try:
            return code.call(functools.partial(cls, **options))
        except CallFailedError as error:
            how = f"with {dict(options)}" if options else "without arguments"
            raise InputError(f"{what} {path!r}: {cls.__name__}() could not be made {how}: {error}") from error.__cause__
