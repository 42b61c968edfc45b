"""Two bar charts of the GPU benchmarks as hand-written SVG: decoding beside its roofline, and update time by factor."""

from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.gpu.targets import sort_parts, stored_value

ROW, LEFT, WIDE, TOP = 26, 320, 420, 44
OURS, THEIRS, MARK = "#2f6f9f", "#b0b0b0", "#c0392b"

Bar = tuple[str, float, float | None, bool]
"""Label, value, a bound drawn as a mark (or None), and whether the bar is ours."""


def bars(title: str, unit: str, entries: Sequence[Bar], form: str) -> str:
    """An SVG of horizontal bars that start at 0. A mark is a thin line across its bar."""
    most = max(max(value, mark or 0.0) for _, value, mark, _ in entries)
    height = TOP + ROW * len(entries) + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + 110} {height}" font-family="sans-serif"'
        ' font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
    ]
    for place, (label, value, mark, ours) in enumerate(entries):
        y = TOP + ROW * place
        wide = WIDE * value / most
        end = max(wide, WIDE * (mark or 0.0) / most)
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{wide:.1f}" height="{ROW - 9}" fill="{OURS if ours else THEIRS}"/>',
            f'<text x="{LEFT + end + 6:.1f}" y="{y + 16}">{form.format(value)} {unit}</text>',
        ]
        if mark is not None:
            x = LEFT + WIDE * mark / most
            lines.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 1}" y2="{y + ROW - 2}" stroke="{MARK}" stroke-width="2"/>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def figures(sections: dict[str, Any]) -> dict[str, str]:
    """SVG text by path. A figure without data is left out."""
    decode: list[Bar] = [
        (
            name.removeprefix("0.6B fixed "),
            result["tokens_per_second"],
            result["tokens"] / result["floor_seconds"],
            "Legato" in name,
        )
        for name, result in (stored_value(sections, "B7") or {}).items()
        if name.startswith("0.6B fixed") and "tokens_per_second" in result
    ]
    update: list[Bar] = [
        (name.removeprefix("0.6B "), result["seconds"]["phase"], None, "Legato" in name)
        for name, result in sort_parts(stored_value(sections, "B4") or {})
        if name.startswith(("0.6B Legato", "0.6B TRL")) and "seconds" in result
    ]
    pictures = {}
    if decode:
        title = "Decoding, 0.6B, 256 sequences (the line: the roofline of that way)"
        pictures["docs/figures/gpu-decode.svg"] = bars(title, "tokens/s", decode, "{:,.0f}")
    if update:
        pictures["docs/figures/gpu-update.svg"] = bars("Update phase, 0.6B, by factor", "s", update, "{:.2f}")
    return pictures
