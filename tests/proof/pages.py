"""Snapshots of pages whose wording is the product, and the numbers of a sentence.

A snapshot is `tests/golden/pages/NAME.txt`. Where a page was changed on purpose, renew the snapshots and read the diff:

    LEGATO_RENEW_PAGES=1 .venv/bin/python -m pytest -k snapshot FILE; git diff tests/golden/pages
"""

import os
import re
from pathlib import Path

PAGES = Path(__file__).parents[1] / "golden" / "pages"
RENEW = "LEGATO_RENEW_PAGES"

_NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def assert_page(name: str, text: str) -> None:
    """Compare a page with its snapshot, or write the snapshot where LEGATO_RENEW_PAGES is set."""
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path = PAGES / f"{name}.txt"
    if os.environ.get(RENEW):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing; run this test with {RENEW}=1 to write it"
    assert text == path.read_text(encoding="utf-8"), f"the page {name} changed; if on purpose, run this test with {RENEW}=1"


def numbers(sentence: str) -> list[float]:
    """Every number of a sentence in order: `+1.6 to 5.0e-04` gives [1.6, 0.0005]. Digits inside names do not count."""
    return [float(each.replace(",", "")) for each in _NUMBER.findall(sentence)]
