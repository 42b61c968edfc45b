"""Scores of the built-in rewards, and responses that cannot be scored."""

import math

import pytest

from legato.core.rollout import Problem, Rollout, Unscorable
from legato.rewards.scoring import Component, WeightedSum, judge
from legato.rewards.verifiers import CountdownMatch, ExactMatch, FormatMatch, LengthPenalty, NumberMatch, read_number
from tests.proof.responses import response


def make_rollout(text: str, answer: str | None = "42", length: int = 3, **fields: object) -> Rollout:
    return response(Problem(prompt="?", answer=answer, fields=fields), text, length)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("42", 1), (" 42\n", 1), ("42.", 0), ("forty-two", 0), ("", 0)],
)
def test_exact_match(text: str, expected: float) -> None:
    assert ExactMatch()(make_rollout(text)) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("the answer is 42", "42", 1),
        ("first 7, then 42.", "42", 1),
        ("42 or 43", "42", 0),
        ("1,234.50", "1234.5", 1),
        ("3/4", "0.75", 1),
        ("-.5", "-1/2", 1),
        ("4" * 5000, "4", 0),
        ("1/0", "1", 0),
        ("none", "42", 0),
        ("x", "#### 42", 0),
        ("42", "so it is #### 42", 1),
    ],
)
def test_number_match_is_exact(text: str, answer: str, expected: float) -> None:
    assert NumberMatch()(make_rollout(text, answer)) == expected


def test_which_only_needs_a_response_of_one_number() -> None:
    assert NumberMatch(which="only")(make_rollout("42")) == 1
    assert NumberMatch(which="only")(make_rollout("it is 42")) == 0
    assert NumberMatch(tolerance=0.01)(make_rollout("42.005")) == 1


@pytest.mark.parametrize("reward", [ExactMatch(), NumberMatch()])
def test_a_problem_without_an_answer_cannot_be_scored(reward: object) -> None:
    assert isinstance(reward(make_rollout("42", answer=None)), Unscorable)


def test_a_reference_answer_without_a_number_is_unscorable() -> None:
    assert isinstance(NumberMatch()(make_rollout("42", answer="many")), Unscorable)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3*5-2", 1),
        ("(5*3)-2", 1),
        ("5*3-2+0", 0),
        ("15-2", 0),
        ("__import__('os').system('true')", 0),
        ("3**5", 0),
        ("((((", 0),
        ("9" * 300, 0),
        ("3/0", 0),
    ],
)
def test_countdown_takes_any_right_expression_and_runs_nothing(text: str, expected: float) -> None:
    assert CountdownMatch()(make_rollout(text, numbers=[3, 5, 2], target=13)) == expected


def test_format_and_length() -> None:
    assert FormatMatch(pattern=r"<a>\d+</a>")(make_rollout("<a>4</a>")) == 1
    assert FormatMatch(pattern=r"<a>\d+</a>")(make_rollout("<a>4</a> and more")) == 0
    penalty = LengthPenalty(free=2, most=6)
    assert [penalty(make_rollout("x", length=n)) for n in (1, 2, 4, 6, 9)] == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="expected a regular expression"):
        FormatMatch(pattern="(")
    with pytest.raises(ValueError, match="not below most"):
        LengthPenalty(free=9, most=6)


def test_numbers_as_people_write_them() -> None:
    assert read_number("1,234") == 1234
    assert read_number("1,23") is None
    assert read_number("") is None


def test_a_weighted_sum_reports_its_components_and_accuracy() -> None:
    reward = WeightedSum(
        components={
            "right": Component(reward=NumberMatch()),
            "short": Component(reward=LengthPenalty(free=2, most=6), weight=0.5, judges=False),
            "style": Component(reward=lambda _: {"a": 0.1, "b": 0.2}, judges=False),
        }
    )
    score = reward.score(make_rollout("42", length=4))
    assert score.accuracy == 1
    assert score.reward == pytest.approx(1 - 0.25 + 0.3)
    assert score.components == {"right": 1, "short": -0.5, "style/a": 0.1, "style/b": 0.2}
    with pytest.raises(ValueError, match="judges the answer"):
        WeightedSum(components={"short": Component(reward=LengthPenalty(), judges=False)})


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "1", {"a": math.nan}, {}, 1j, [1.0], 1e308])
def test_a_reward_that_is_not_a_finite_number_is_unscorable(bad: object) -> None:
    verdict = judge(lambda _: bad, make_rollout("42"))
    assert isinstance(verdict, Unscorable)
    assert repr(bad) in verdict.reason


def test_a_reward_that_raises_is_unscorable_and_the_others_are_scored() -> None:
    def fragile(one: Rollout) -> float:
        return 1 / len(one.text)

    reward = WeightedSum(components={"fragile": Component(reward=fragile)})
    broken, whole = reward.score(make_rollout("")), reward.score(make_rollout("ab"))
    assert broken == Unscorable("fragile: ZeroDivisionError: division by zero")
    assert whole.reward == 0.5
