"""Reads TOML files. Errors are one line with the file and, if known, the line number."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from legato.errors import InputError

_LARGEST_FILE = 1_000_000
"""Largest recipe in bytes. A larger file (a model, a data set) was named by mistake."""

_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\xef\xbb\xbf": "UTF-8 with a byte order mark"}
_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")
_IN_OUR_WORDS = {
    "Cannot overwrite a value": "this key has been given before",
    "Cannot declare": "this table has been opened before:",
    "Cannot mutate immutable namespace": "this table has been closed before:",
}


RECIPES = Path(__file__).parents[1] / "recipes"
"""The recipes in the package; in a checkout a link to recipes/."""


def find_recipe(path: Path) -> Path:
    """The recipe of the package that `recipes/NAME.toml`, `NAME.toml` or `NAME` names, where no such file is here."""
    if os.path.exists(path) or path.is_absolute() or path.suffix not in ("", ".toml"):
        return path
    inside = path.relative_to("recipes") if path.is_relative_to("recipes") else path
    packaged = (RECIPES / inside.parent / f"{inside.name.removesuffix('.toml')}.toml").absolute()
    return packaged if ".." not in inside.parts and os.path.isfile(packaged) else path


def read_file(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file and its parsed tree. A recipe of the package is found from any directory."""
    text = _decode(path, _bytes(find_recipe(path)))
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply to be a configuration") from None
    except ValueError as error:  # TOMLDecodeError is one; a number of thousands of digits raises another
        raise InputError(_syntax_message(path, text, str(error))) from None
    if not tree:
        raise InputError(
            f"{path}:1: expected options, got an empty file; write some, for instance [training] with lr = 1e-6"
        )
    return text, tree


def _bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise InputError(f"{path}: expected a TOML file, got a folder")
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: expected a TOML file, got something that is not a regular file")
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        recipes = ", ".join(sorted(each.stem for each in RECIPES.glob("*.toml")))
        hint = "" if path.is_absolute() else f"; recipes in the package: {recipes}"
        raise InputError(f"{path}: expected a TOML file, got a path that does not exist{hint}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > _LARGEST_FILE:
        raise InputError(f"{path}: expected a TOML file of at most {_LARGEST_FILE} bytes, got a larger file")
    return content


def _decode(path: Path, content: bytes) -> str:
    for mark, encoding in _MARKS.items():
        if content.startswith(mark):
            raise InputError(f"{path}:1: the file is {encoding}; save it as plain UTF-8")
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise InputError(f"{path}:{line}: a NUL byte; a TOML file is text in plain UTF-8")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8; save it as plain UTF-8") from None


def _syntax_message(path: Path, text: str, message: str) -> str:
    place = _PLACE.search(message)
    what = _PLACE.sub("", message).replace(" (at end of document)", ", but the file ends")
    for theirs, ours in _IN_OUR_WORDS.items():
        what = what.replace(theirs, ours)
    if place is None:
        return f"{path}:{len(text.splitlines()) or 1}: not TOML: {what}"
    number, column = int(place[1]), int(place[2])
    line = text.replace("\r\n", "\n").split("\n")[number - 1].strip()
    return f"{path}:{number}: not TOML: {what} (column {column} of {line[:80]!r})"
