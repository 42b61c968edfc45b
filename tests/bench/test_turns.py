"""What the benchmark of kept KV caches measures: the same episodes on both sides, and the section that shows it."""

from typing import Any

from benchmarks import turns
from legato.rollouts.local.engine import LocalEngine


def test_both_sides_play_the_same_episodes_and_only_one_reuses() -> None:
    case = {"groups": 2, "samples": 2, "prompt": 5, "turns": 3, "response": 2, "reply": 2}
    reused = []
    for keep in (False, True):
        engine = LocalEngine(turns.build_policy("tiny"), way="blocks")
        assert turns.play(engine, 64, case, keep) > 0
        reused.append(engine.keeper.reused_tokens)
    # Two later turns of four episodes: all tokens of the earlier turn but the one that was never read.
    assert reused == [0, 4 * (5 + 2 - 1) + 4 * (5 + 2 + 2 + 2 - 1)]


def test_the_section_shows_the_stored_rows() -> None:
    row: dict[str, Any] = {"model": "tiny", "groups": 2, "samples": 4, "prompt": 5, "turns": 3, "response": 2, "reply": 1}
    row |= {"anew_seconds": 1.0, "kept_seconds": 0.5, "ratio": 2.0}
    page = turns.turns_section({"rows": [row], "repeats": 3, "on": "a machine", "date": "2026-01-01", "commit": "abc"})
    assert (
        "| tiny shape | 2 x 4 | 3 | 5, 2, 1 | 1.00 | 0.50 | 2.00 |" in page and "a machine, 2026-01-01, commit abc" in page
    )
