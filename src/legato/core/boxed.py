r"""The answer of a solution in TeX: what stands in its last \boxed{...}."""

import re

_COMMAND = re.compile(r"\\(?:boxed|fbox)\b\s*")


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds, its braces balanced; `\boxed 5` holds 5; None if there is none."""
    commands = list(_COMMAND.finditer(text))
    if not commands:
        return None
    found = commands[-1]
    if not text.startswith("{", found.end()):
        # The space ends the command's argument at the dollar that closes the formula, as in `$\boxed 5$`.
        return text[found.end() :].split("$")[0].strip() or None
    depth = 0
    for place in range(found.end(), len(text)):
        # A brace after a backslash is a sign to print, as in \{1, 2\}.
        if text[place] in "{}" and not _escaped(text, place):
            depth += 1 if text[place] == "{" else -1
        if depth == 0:
            return text[found.end() + 1 : place].strip() or None
    return None


def _escaped(text: str, place: int) -> bool:
    start = place
    while start and text[start - 1] == "\\":
        start -= 1
    return (place - start) % 2 == 1
