"""Numbers as words."""


def count(number: int, what: str) -> str:
    """Return a number with its noun, plural if needed: 1 step, 2 steps."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
