"""Text of a model made safe to look at: what would not be seen, or would move what is seen, is shown as an escape."""

import unicodedata

_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Control, format (bidi overrides, zero width, tags), surrogate, private, unassigned, separators of lines and paragraphs."""


def legible(text: str, *, one_line: bool = False) -> str:
    """`text` with every unseen character as its Python escape; line feeds stay unless `one_line`.

    It escapes neither HTML nor rich markup: that is the affair of who prints it.
    """
    kept = "" if one_line else "\n\t"
    return "".join(character if character in kept or not _unseen(character) else _escape(character) for character in text)


def piece(text: str) -> str:
    """The text of a token: its spaces are seen, and so is that it has none."""
    return legible(text, one_line=True).replace(" ", "\u2423") or "\u2205"


def shorten(text: str, width: int) -> str:
    """At most `width` characters, the middle left out: questions start a text and answers end it."""
    if len(text) <= width:
        return text
    if width < 8:
        return text[:width]
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def _unseen(character: str) -> bool:
    return unicodedata.category(character) in _UNSEEN


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
