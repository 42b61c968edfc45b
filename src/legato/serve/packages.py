"""Which packages a server needs. Nothing here imports them."""

from importlib.util import find_spec

from legato.errors import InputError

PACKAGES = ("starlette", "uvicorn", "orjson")
"""httptools is used where it is installed (`connections.py`)."""


def has_server_packages() -> bool:
    return all(find_spec(name) is not None for name in PACKAGES)


def check_server_packages(what: str) -> None:
    """InputError, with `what` needs them, if packages of a server are not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(f"{what} needs {' and '.join(missing)}: pip install 'legato[serve]'")
