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
    scanner = _Scanner(text)
    # Line numbers only make messages more helpful. If the scanner fails, the lines so far are still right.
    with contextlib.suppress(_ScanError):
        scanner.document()
    return scanner.lines


class _ScanError(Exception):
    pass


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: dict[Path, int] = {}
        self._counted, self._line = 0, 1

    def document(self) -> None:
        table: Path = ()
        self._take(_BLANK)
        while self.at < len(self.text):
            if self._skip("["):
                self._skip("[")
                self._take(_BLANK)
                table = self._key(())
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
            self._items("]", lambda: self._value(path))
        elif self._skip("{"):
            self._items("}", lambda: self._assignment(path))
        elif self.text[self.at : self.at + 1] in ("'", '"'):
            self._take(_STRING)
        else:
            self._take(_PLAIN)

    def _items(self, end: str, item: Callable[[], None]) -> None:
        self._take(_BLANK)
        while not self._skip(end):
            item()
            self._take(_BLANK)
            self._skip(",")
            self._take(_BLANK)

    def _key(self, table: Path) -> Path:
        line, path = self._line_here(), table
        while True:
            word = self._take(_KEY)
            path = (*path, next(iter(tomllib.loads(f"{word} = 0"))) if word[0] in "'\"" else word)
            self.lines.setdefault(path, line)
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
