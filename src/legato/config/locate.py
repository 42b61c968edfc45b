"""Finds the line of each key in a TOML text, which `tomllib` does not report.

`tomllib` has parsed the text before, so it is valid and a scanner of strings, brackets and keys is enough.
"""

import contextlib
import re
import tomllib
from collections.abc import Callable

Path = tuple[str, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*\'''',
    re.DOTALL,
)
_PLAIN = re.compile(r"[^\s,\]}#]+")
_LINE = re.compile(r"[^\n]*")


def locate(text: str) -> dict[Path, int]:
    """The line number of each key and table by its path: its first line if it occurs several times (arrays of tables)."""
    return _scan(text).lines


def locate_items(text: str) -> dict[Path, int]:
    """The line numbers of the tables in arrays and of what they hold. The path has the number of the table in its array.

    >>> locate_items("[[a]]\\nb = 1\\n[[a]]\\nb = 2")
    {('a', '0'): 1, ('a', '0', 'b'): 2, ('a', '1'): 3, ('a', '1', 'b'): 4}
    """
    return _scan(text).items


def _scan(text: str) -> "_Scanner":
    scanner = _Scanner(text)
    # Line numbers only make messages more helpful. If the scanner fails, the lines so far are still right.
    with contextlib.suppress(_ScanError):
        scanner.document()
    return scanner


class _ScanError(Exception):
    pass


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: dict[Path, int] = {}
        self.items: dict[Path, int] = {}
        self._places: dict[Path, int] = {}
        """The number of the table at hand in each array."""
        self._counted, self._line = 0, 1

    def document(self) -> None:
        table: Path = ()
        self._take(_BLANK)
        while self.at < len(self.text):
            if self._skip("["):
                in_array = self._skip("[")
                self._take(_BLANK)
                line = self._line_here()
                table = self._key((), numbered=not in_array)
                if in_array:
                    self._enter(table, line)
            else:
                self._assignment(table)
            # Skip the rest of the line: "07:32:00" of a date and time, the closing brackets of a header, comments.
            self._take(_LINE)
            self._take(_BLANK)

    def _assignment(self, table: Path) -> None:
        path = self._key(table)
        self._take(_BLANK)
        if not self._skip("="):
            raise _ScanError
        self._value(path)

    def _value(self, path: Path) -> None:
        self._take(_BLANK)
        if self._skip("["):
            self._items("]", lambda: self._item(path))
        elif self._skip("{"):
            self._items("}", lambda: self._assignment(path))
        elif self.text[self.at : self.at + 1] in ("'", '"'):
            self._take(_STRING)
        else:
            self._take(_PLAIN)

    def _item(self, path: Path) -> None:
        self._take(_BLANK)
        self._enter(path, self._line_here())
        self._value(path)

    def _enter(self, array: Path, line: int) -> None:
        """Begin the next table of an array."""
        self._places[array] = self._places.get(array, -1) + 1
        self.items[self._add_table_numbers(array)] = line

    def _add_table_numbers(self, path: Path) -> Path:
        """The path with the number of the table at hand after the name of each array."""
        words: list[str] = []
        for length, word in enumerate(path, start=1):
            words.append(word)
            if path[:length] in self._places:
                words.append(str(self._places[path[:length]]))
        return tuple(words)

    def _items(self, end: str, item: Callable[[], None]) -> None:
        self._take(_BLANK)
        while not self._skip(end):
            item()
            self._take(_BLANK)
            self._skip(",")
            self._take(_BLANK)

    def _key(self, table: Path, *, numbered: bool = True) -> Path:
        line, path = self._line_here(), table
        while True:
            word = self._take(_KEY)
            path = (*path, next(iter(tomllib.loads(f"{word} = 0"))) if word[0] in "'\"" else word)
            self.lines.setdefault(path, line)
            if numbered and (inside := self._add_table_numbers(path)) != path:
                self.items.setdefault(inside, line)
            if not _DOT.match(self.text, self.at):
                return path
            self._take(_DOT)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise _ScanError
        self.at = match.end()
        return match.group()

    def _skip(self, sign: str) -> bool:
        present = self.text.startswith(sign, self.at)
        self.at += len(sign) if present else 0
        return present

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line
