"""The details of each token in a step's report equal the formulas in plain Python."""

import math
from typing import Any

import pytest

from legato.policy.model.tiny import character_tokenizer
from legato.training.details import pieces
from legato.training.report import StepReport
from tests.training.test_trainer import trainer


def rows(report: StepReport) -> list[tuple[Any, dict[str, Any]]]:
    members = [member for group in report.groups for member in group.members]
    return list(zip(members, report.details, strict=True))


@pytest.mark.parametrize("passes", ["one", "two"])
def test_coefficients_are_those_of_the_formula(passes: str) -> None:
    """gspo: s A / (N L) at every token, s the exponential of the mean of the log-ratios, 0 where it is clipped."""
    narrow = {"objective.trust.clip.low": 1e-5, "objective.trust.clip.high": 1e-5}
    run = trainer(changes=narrow, update_passes=passes)
    report = run.step(10**6)
    trained = [row for _, row in rows(report) if row["advantage"]]
    assert trained
    updates = [row["details"]["update"] for row in trained]
    assert {0, 1} <= set(updates) <= {0, 1, 2, 3}  # all rows of an update may be without an advantage
    cut = 0
    for row in trained:
        details = row["details"]
        log_s = math.fsum(details["log_ratios"]) / len(details["pieces"])
        if details["update"] == 0:
            assert set(details["log_ratios"]) == {0.0}
        outside = log_s > math.log1p(1e-5) if row["advantage"] > 0 else log_s < math.log1p(-1e-5)
        # 8 prompts of 4 samples in 4 updates
        expected = 0.0 if outside else math.exp(log_s) * row["advantage"] / (8 * len(details["pieces"]))
        assert details["coefficients"] == pytest.approx([expected] * len(details["pieces"]), rel=1e-4)
        cut += outside
    assert 0 < cut < len(trained)


def test_advantages_are_those_of_the_group() -> None:
    report = trainer().step(10**6)
    pairs = rows(report)
    start = 0
    for group in report.groups:
        rewards = [member.score.reward for member in group.members]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        expected = [(reward - mean) / deviation if deviation else 0.0 for reward in rewards]
        assert [row["advantage"] for _, row in pairs[start : start + len(rewards)]] == pytest.approx(expected, abs=1e-3)
        start += len(rewards)


def test_texts_and_log_probs_are_those_of_the_sampler() -> None:
    words = character_tokenizer()
    for member, row in rows(trainer().step(10**6)):
        rollout = member.rollout
        assert row["details"]["logprobs"] == pytest.approx(rollout.sampler_logprobs.tolist(), rel=1e-4)
        assert "".join(row["details"]["pieces"]) == words.decode(rollout.tokens, skip_special_tokens=False)
        if row["advantage"] == 0:
            assert row["details"]["coefficients"] is row["details"]["log_ratios"] is row["details"]["update"] is None


def test_details_cover_at_most_the_requested_tokens_and_do_not_change_training() -> None:
    reports = {most: trainer().step(most) for most in (None, 0, 7)}
    assert reports[None].details == ()
    assert all(set(row) == {"advantage"} for row in reports[0].details)
    shown = [row["details"] for row in reports[7].details if "details" in row]
    assert sum(len(each["pieces"]) for each in shown) == sum(len(each["logprobs"]) for each in shown) == 7
    plain = [
        {key: value for key, value in each.metrics.items() if "time" not in key and "second" not in key}
        for each in reports.values()
    ]
    assert repr(plain[0]) == repr(plain[1]) == repr(plain[2])


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8, as parts of a character are in the vocabularies of today."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def test_a_character_of_several_tokens_stands_at_the_last_of_them() -> None:
    text = "a\u00e9\u6f22\U0001f600!"
    assert pieces(list(text.encode()), Bytes()) == ["a", "", "\u00e9", "", "", "\u6f22", "", "", "", "\U0001f600", "!"]
    assert pieces(list(text.encode())[:2], Bytes()) == ["a", "\ufffd"]
