r"""The answer of a solution in TeX: the contents of its last \boxed{...}."""

import re

_COMMAND = re.compile(r"\\(?:boxed|fbox)\b\s*")


def last_boxed(text: str) -> str | None:
    r"""The contents of the last \boxed{...} or \fbox{...} with balanced braces (5 for `\boxed 5`); None if there is none."""
    commands = list(_COMMAND.finditer(text))
    if not commands:
        return None
    command = commands[-1]
    if not text.startswith("{", command.end()):
        # The space ends the command's argument at the dollar that closes the formula, as in `$\boxed 5$`.
        return text[command.end() :].split("$")[0].strip() or None
    depth = 0
    for place in range(command.end(), len(text)):
        # A brace after a backslash is printed, as in \{1, 2\}, and opens no group.
        if text[place] in "{}" and not _is_escaped(text, place):
            depth += 1 if text[place] == "{" else -1
        if depth == 0:
            return text[command.end() + 1 : place].strip() or None
    return None


def _is_escaped(text: str, place: int) -> bool:
    start = place
    while start and text[start - 1] == "\\":
        start -= 1
    return (place - start) % 2 == 1
