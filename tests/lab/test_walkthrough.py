"""Worked examples, and replayed rollouts of a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.lab import walkthrough
from legato.lab.examples import group, outliers
from legato.lab.replay import replay
from legato.lab.strip import strips, walk_tokens
from legato.lab.walkthrough import examples, inside_from, walk_run


def ignore(text: str) -> None:
    pass


def test_the_worked_examples_match_their_expected_values() -> None:
    account = examples()
    assert len(account.checks) == 16
    assert [check.what for check in account.checks if check.verdict != "as expected"] == []


def test_the_outliers_are_inside_the_band_from_915_tokens_on() -> None:
    assert inside_from((1.9, 0.4), 3e-4, 4e-4) == 915
    for length, outside in ((914, True), (915, False)):
        assert walk_tokens(outliers(length), "gspo")[0].tokens[0].outside is outside
    assert inside_from((2.0,), 3e-4, 4e-4) == 1734  # above: ln 2 / log1p(4e-4) = 1733.2


def test_clipping_of_the_group_of_four_by_token_and_by_sequence() -> None:
    """Clip fractions of the specification: GRPO 2 of 14 tokens, GSPO 2 of 4 responses, which are 5 tokens; 3 outside."""
    token, sequence = walk_tokens(group(), "grpo"), walk_tokens(group(), "gspo")
    assert sum(walk.clipped for walk in token) == 2
    assert [walk.clipped for walk in sequence] == [0, 3, 2, 0]
    assert [walk.tokens[0].outside for walk in sequence] == [False, True, True, True]
    assert [t.weight for t in sequence[3].tokens] == pytest.approx([1.268709192825] * 5)
    assert [t.coefficient for t in sequence[0].tokens] == pytest.approx([0.0625156269533] * 4)


def test_token_text_is_escaped_in_html() -> None:
    rows = group()
    words = (("<script>", "\u202e", " ", "x"), *rows.words[1:])
    shown = strips(
        walk_tokens(type(rows)(**{name: getattr(rows, name) for name in rows.__slots__} | {"words": words}), "grpo")
    )
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "\\u202e" in shown


def test_without_an_advantage_nothing_is_clipped() -> None:
    rows = replace(group(), advantages=torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64))
    shown = strips(walk_tokens(rows, "gspo"))
    # The second response, of three tokens, is outside on the side of its advantage; the last two have none.
    assert shown.count("line-through") == 3


def test_a_replayed_step_matches_the_stored_step(run: Path) -> None:
    account = walk_run(run, step=2, rollout=None, words=[], say=ignore)
    assert any("all 64 responses are those the run stored" in sentence for sentence in account.sentences)
    assert account.data["update"] > 0
    sheet = next(sheet for sheet in account.sheets if sheet.name == "group-responses")
    assert len(sheet.rows) == 8 and sum("this one" in str(row[0]) for row in sheet.rows) == 1


def test_any_rollout_can_be_chosen(run: Path) -> None:
    account = walk_run(run, step=1, rollout=5, words=[], say=ignore)
    assert account.data["rollout"] == 5 and account.title.startswith("Rollout 5 of step 1")


def test_without_a_step_the_next_step_is_walked_through(run: Path) -> None:
    assert walk_run(run, step=None, rollout=None, words=[], say=ignore).data["step"] == 5


def test_a_response_without_tokens_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walkthrough, "replay", lambda *arguments: replace(replay(*arguments), observed=()))
    with pytest.raises(ValueError, match="rollout 3 of step 5 has no token"):
        walk_run(run, step=None, rollout=3, words=[], say=ignore)


def test_rollouts_steps_and_folders_that_do_not_exist_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected --rollout from 0 to 63, got 64"):
        walk_run(run, step=None, rollout=64, words=[], say=ignore)
    with pytest.raises(ValueError, match=r"expected --step from 1 to 5, got 500 \(.* has 4 steps\)"):
        walk_run(run, step=500, rollout=None, words=[], say=ignore)
    with pytest.raises(ValueError, match="expected a run directory"):
        walk_run(tmp_path, step=None, rollout=None, words=[], say=ignore)
