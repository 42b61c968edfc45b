"""Stand-ins for packages that SGLang imports by name and that a dense model with Triton attention never calls.

`carry_sglang.sh` copies this file beside SGLang and writes a package of two lines for each of them:

    import stand_in
    stand_in.install(__name__)

Every name of such a package, of its modules and of these names is a class; making one raises.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below a package."""

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """A module for any name below the package."""
        if fullname.startswith(self.root + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> None:
        """The usual module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give it every name."""
        fill(module)


class _Anything(type):
    """A class that has every attribute: members of enumerations are read while modules are imported."""

    @classmethod
    def make(cls, path: str) -> "_Anything":
        """The stand-in of this name."""
        before, _, name = path.rpartition(".")
        if name.startswith("__"):
            raise AttributeError(name)
        return cls(name, (), {"__new__": _refuse(path), "__module__": before})

    def __getattr__(cls, name: str) -> Any:
        made = _Anything.make(f"{cls.__module__}.{cls.__name__}.{name}")
        setattr(cls, name, made)
        return made


def fill(module: ModuleType) -> None:
    """Give a module every name that is asked of it."""

    def get(name: str) -> Any:
        made = _Anything.make(f"{module.__name__}.{name}")
        setattr(module, name, made)
        return made

    module.__getattr__ = get  # type: ignore[method-assign]


def _refuse(name: str) -> Any:
    def new(cls: type, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} is a stand-in in this cut-down SGLang")

    return new


def install(root: str) -> None:
    """Make the package `root`, which is being imported, a stand-in."""
    fill(sys.modules[root])
    vars(sys.modules[root]).setdefault("__version__", "0.0")  # transformers compares versions
    sys.meta_path.insert(0, _Finder(root))
