"""Makes model text safe to display: invisible and direction-changing characters are shown as escapes."""

import unicodedata

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Control, format (bidi overrides, zero width, tags), surrogate, private, unassigned, separators of lines and paragraphs."""


def legible(text: str, *, one_line: bool = False) -> str:
    """Return `text` with every invisible character as its Python escape; line feeds stay unless `one_line`.

    HTML and rich markup are not escaped; the caller does that.
    """
    allowed = "" if one_line else "\n\t"
    return "".join(
        character if character in allowed or not _is_invisible(character) else _escape(character) for character in text
    )


def piece(text: str) -> str:
    """Return the text of a token with visible spaces; an empty token is shown as a symbol."""
    return legible(text, one_line=True).replace(" ", "\u2423") or "\u2205"


def shorten(text: str, width: int) -> str:
    """Shorten to `width` characters by leaving out the middle: questions start a text and answers end it."""
    if len(text) <= width:
        return text
    if width < 8:
        return text[:width]
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) in _INVISIBLE


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
