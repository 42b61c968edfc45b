"""Importing the user's code by path, "module:name" or "file.py:name": parts, tasks, rewards and engines."""

import ast
import functools
import hashlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from legato.core.place import advice_from_above
from legato.core.user_code import DEFAULT_SECONDS, CallFailedError, UserCode
from legato.errors import InputError, nearest

_IMPORT_PATH = re.compile(r"(?:[^\W\d]\w*(?:\.[^\W\d]\w*)*|.*\.py):[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_OWN = "legato_own_"
_HASH = "__legato_sha256__"
IMPORT_SECONDS = DEFAULT_SECONDS
"""How long a file may take to be imported, or a class to be made: it may load a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCode:
    """A class or function of the user: its name in a configuration, and the file that defines it.

    Or a module that such a file imports; then the reference is the name of the module.
    """

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
    """The path of a class or function: "/absolute/file.py:Name" for a single file, "module:Name" for a package."""
    module = sys.modules.get(thing.__module__)
    file = source_file(module)
    if file is None or not _is_single_file(thing.__module__, file):
        return f"{thing.__module__}:{thing.__qualname__}"
    return f"{file}:{thing.__qualname__}"


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
    if file is None or not _is_local(file):
        return None
    return OwnCode(reference=path, file=str(file), sha256=_sha256_of(module, file))


def search_beside(codes: Iterable[Mapping[str, str]]) -> None:
    """Let imports find the modules of recorded `OwnCode` where they were, whatever the current directory is."""
    for code in codes:
        module, _, _ = code["reference"].rpartition(":")
        if module.endswith(".py"):
            continue
        file = Path(code["file"])
        above = module.count(".") + (file.name == "__init__.py")
        if file.is_file() and above < len(file.parents):
            _also_search(file.parents[above])


def imported_modules(codes: Sequence[OwnCode]) -> list[OwnCode]:
    """The user's modules that these files import, directly or through one another, sorted by name.

    The files' import statements are followed, also those inside functions. Modules that were imported otherwise
    (`importlib`) count if they were loaded together with one of the files. A module that has not been loaded counts if its
    file lies below the folder of one of these files or below the current one.
    """
    folders = [Path.cwd(), *(Path(code.file).parent for code in codes)]
    modules: dict[str, Path] = {}
    waiting = [(Path(code.file), _package_of(code.reference)) for code in codes]
    while waiting:
        file, package = waiting.pop()
        names = {*_imports(file, package), *_LOADED_WITH.get(str(file), ())} - {*modules}
        for name in sorted(names):
            place = _place_of(name, folders)
            if place is not None and _is_local(place) and str(place) not in {code.file for code in codes}:
                modules[name] = place
                waiting.append((place, name if place.stem == "__init__" else name.rpartition(".")[0]))
    return [
        OwnCode(reference=name, file=str(place), sha256=_sha256_of(sys.modules.get(name), place))
        for name, place in sorted(modules.items())
    ]


_LOADED_WITH: dict[str, set[str]] = {}
"""The names of the modules that came into `sys.modules` with the import of a file."""


def _package_of(reference: str) -> str:
    """The package that relative imports of a user's file start from; empty for a single file."""
    place = reference.rpartition(":")[0]
    if place.endswith(".py"):
        return ""
    return place if hasattr(sys.modules.get(place), "__path__") else place.rpartition(".")[0]


def _imports(file: Path, package: str) -> Iterator[str]:
    """The names of all modules that the import statements of a file may mean."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # changed since it was loaded
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            listed = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            listed = [start, *(f"{start}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in listed:
            pieces = name.split(".")
            # `import a.b` loads a as well.
            yield from (".".join(pieces[:count]) for count in range(1, len(pieces) + 1) if all(pieces[:count]))


def _place_of(name: str, folders: Sequence[Path]) -> Path | None:
    """The file of a module by name, without importing it; None if there is none, or none in these folders."""
    if name in sys.modules:
        file = source_file(sys.modules[name])
        return file if file is not None and file.is_file() else None
    path: Sequence[str] | None = None
    pieces, spec = name.split("."), None
    try:
        for count in range(1, len(pieces) + 1):
            spec = PathFinder.find_spec(".".join(pieces[:count]), path)
            if spec is None:
                return None
            path = spec.submodule_search_locations
            if path is None and count < len(pieces):
                return None  # a name of that module
    except (ImportError, ValueError, OSError):
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    place = Path(spec.origin).resolve()
    return place if any(place.is_relative_to(folder) for folder in folders) else None


@functools.cache
def _not_local() -> tuple[Path, ...]:
    """The folders of the standard library and of Legato."""
    library = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return (*(Path(each).resolve() for each in library), Path(__file__).resolve().parents[1])


def _is_local(file: Path) -> bool:
    """Whether a file is the user's: neither installed, nor of the standard library, nor of Legato."""
    installed = {"site-packages", "dist-packages"} & {*file.parts}
    return not installed and not any(file.is_relative_to(folder) for folder in _not_local())


def _is_single_file(module: str, file: Path) -> bool:
    """Whether loading the file alone gives the module: no package, not installed, not the script that runs."""
    alone = "." not in module and module != "__main__" and file.name != "__init__.py"
    return alone and file.suffix == ".py" and "site-packages" not in file.parts


def _sha256_of(module: ModuleType | None, file: Path) -> str:
    """The hash of a module's file as it was when it was first asked for: later changes are not what this process runs."""
    recorded = getattr(module, "__dict__", {}).get(_HASH)
    if isinstance(recorded, str):
        return recorded
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    if module is not None:
        vars(module)[_HASH] = sha256
    return sha256


def place_in_own_code(error: BaseException) -> str | None:
    """The line of the user's code that was running when an exception was raised, "my_clip.py:16, in apply".

    None if Legato's own code raised it. Only files that Legato imported by a path of the configuration count.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename in _LOADED_WITH:
            place = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    return place


def check_file(what: str, path: str) -> Path | None:
    """The file of an import path, None for a module; InputError if there is no such file."""
    place = path.rpartition(":")[0]
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise InputError(f"{what} {path!r}: there is no file {file}{advice_from_above(Path(place))}")
    return file


def _module(what: str, place: str, path: str) -> ModuleType:
    file = check_file(what, path)
    _also_search(Path.cwd() if file is None else file.parent)
    loaded = sys.modules.get(place) if file is None else None
    if loaded is not None:
        return loaded
    before = {*sys.modules}
    with UserCode(f"the import of {place}", IMPORT_SECONDS) as code:
        try:
            module = code.call(import_module, place) if file is None else code.call(_module_of_file, file)
        except CallFailedError as error:
            raise InputError(f"{what} {path!r}: {place} could not be imported: {error}") from error.__cause__
    loaded_from = source_file(module)
    if loaded_from is not None:
        _LOADED_WITH.setdefault(str(loaded_from), set()).update({*sys.modules} - before - {module.__name__})
    return module


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
