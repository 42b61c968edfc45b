r"""The answer of a solution in TeX: the contents of its last \boxed{...}."""

import re

_COMMAND = re.compile(r"\\(?:boxed|fbox)\b\s*")


def last_boxed(text: str) -> str | None:
    r"""The contents of the last \boxed{...} or \fbox{...} with balanced braces (5 for `\boxed 5`); None if there is none."""
    commands = list(_COMMAND.finditer(text))
    box = _read_box(text, commands[-1]) if commands else None
    return None if box is None else box[2]


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, contents) of every \boxed{...} that is complete and not empty, in order; of nested ones the outer."""
    listed: list[tuple[int, int, str]] = []
    end = 0
    # A response of nothing but openings would be read to its end for each of them.
    for command in list(_COMMAND.finditer(text))[-_MOST_BOXES:]:
        box = _read_box(text, command) if command.start() >= end else None
        if box is not None:
            listed.append(box)
            end = box[1]
    return listed


_MOST_BOXES = 50


def _read_box(text: str, command: re.Match[str]) -> tuple[int, int, str] | None:
    if not text.startswith("{", command.end()):
        # The space ends the command's argument at the dollar that closes the formula, as in `$\boxed 5$`.
        content = text[command.end() :].split("$")[0]
        return (command.start(), command.end() + len(content), content.strip()) if content.strip() else None
    depth = 0
    for place in range(command.end(), len(text)):
        # A brace after a backslash is printed, as in \{1, 2\}, and opens no group.
        if text[place] in "{}" and not _is_escaped(text, place):
            depth += 1 if text[place] == "{" else -1
        if depth == 0:
            content = text[command.end() + 1 : place].strip()
            return (command.start(), place + 1, content) if content else None
    return None


def _is_escaped(text: str, place: int) -> bool:
    start = place
    while start and text[start - 1] == "\\":
        start -= 1
    return (place - start) % 2 == 1
