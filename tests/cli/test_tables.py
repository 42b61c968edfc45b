"""Tables on narrow terminals."""

import io

import pytest
from rich.console import Console

from legato.cli.tables import show_table

HEADINGS = ("arm and options", "mean accuracy", "95 % interval", "seconds", "effective tokens")
ROWS = [
    ("gspo, training.lr=0.0001", "0.123456789", "0.11 to 0.14", "1,234,567.8", "139.0"),
    ("grpo", "-1.23456e-05", "-", "12", "44 \x1b[31m"),
]


def print_table(width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show_table(console, "A title", HEADINGS, ROWS)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_word_and_no_number_is_broken(width: int) -> None:
    text = print_table(width)
    words = text.split()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    for cell in (*HEADINGS, *ROWS[0], *ROWS[1][:4]):
        assert all(word in words for word in cell.split()), cell
    assert "\x1b" not in text and "\\x1b[31m" in words


def test_columns_that_do_not_fit_stand_below_with_the_names_of_the_rows() -> None:
    assert print_table(200).count("grpo") == 1 and "gspo, training.lr=0.0001" in print_table(200)
    assert print_table(40).count("grpo") > 1 and print_table(40).count("A title") == 1
