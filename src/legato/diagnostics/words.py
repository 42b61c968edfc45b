"""Numbers as words."""


def count(number: int, what: str) -> str:
    """Return a number with its noun, plural if needed: 1 step, 2 steps."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def show_bytes(size: float) -> str:
    """Bytes for people: 640 kB, 12 MB, 4.8 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= 0.95 * scale:
            return f"{size / scale:.1f} {unit}" if size < 9.95 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size / 1e3:,.0f} kB"
