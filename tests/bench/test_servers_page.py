"""The table of what was checked at a real SGLang tells what was not, whatever ended the checks."""

from typing import Any

import pytest

from benchmarks import servers_page
from benchmarks.servers_page import NOT_RUN, SGLANG_PARTS, sglang_block

ROWS = [[part, "a figure", 1.0] for part in SGLANG_PARTS]
LAST = "SIGKILL during a batch; a run that trains"
THREE = f"a publish with requests in flight; {LAST}"


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ({"rows": ROWS}, None),
        ({"rows": [*ROWS[:-2], ["kill", NOT_RUN, "12 s were left"]]}, LAST),
        ({"rows": ROWS[:4]}, THREE),
        ({"rows": ROWS[:5], "failed": "E: 1", "stopped_in": "across"}, THREE),
        ({"rows": ROWS, "failed": "E: 1", "stopped_in": "kill"}, "SIGKILL during a batch"),
    ],
)
def test_parts_that_were_not_checked_are_named(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], missing: str | None
) -> None:
    monkeypatch.setattr(servers_page, "load", lambda name: [{"day": "2026-01-01", "commit": "", **more}])
    block = sglang_block()
    told = block.partition("**Not checked at a real SGLang: ")[2].partition(".**")[0]
    assert told == (missing or "") and ("The checks stopped at" in block) is ("failed" in more)
    assert NOT_RUN not in block and "E: 1" not in block


def test_values_are_shown_as_words_and_repeated_ones_in_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["publish", "kept old weights", False], ["publish", "kept old weights", True], ["kill", "versions", [0, 1]]]
    monkeypatch.setattr(servers_page, "load", lambda name: [{"day": "2026-01-01", "commit": "", "rows": rows}])
    lines = sglang_block().splitlines()
    assert "| publish | kept old weights | no; yes |" in lines and "| kill | versions of the tokens | 0, 1 |" in lines


def test_what_a_later_command_checked_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"day": "2026-01-01", "commit": "abc1234", "rows": ROWS[:5], "failed": "E: 1", "stopped_in": "across"}
    second = {"day": "2026-01-02", "commit": "def5678", "rows": [ROWS[0], *ROWS[4:]]}
    monkeypatch.setattr(servers_page, "load", lambda name: [first, second])
    block = sglang_block()
    assert "Not checked" not in block and "stopped" not in block and "| start | a figure | 1; 1 |" in block
    assert "Read on 2026-01-02, commit def5678: the start, a publish with requests in flight, SIGKILL" in block


def test_the_checks_are_those_of_the_page() -> None:
    with_sglang = pytest.importorskip("benchmarks.gpu.with_sglang")
    assert set(with_sglang.CHOICES) == set(SGLANG_PARTS) - {"start", "learn"}
