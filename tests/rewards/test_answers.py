"""Final answers: found in the ways in which models write them, compared as text, as numbers and by Math-Verify."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legato.config.kinds import make, usual_evaluation
from legato.core.rollout import Problem, StopReason
from legato.rewards.answers import exact_value, find_answer, normal_form
from tests.proof.responses import response
from tests.proof.written_answers import ANSWERS

COLUMNS = {"gsm8k": ("question", "answer"), "olympiad": ("question", "final_answer"), "minerva": ("question", "answer")}


def score(name: str, published: Any, text: str, folder: Path) -> Any:
    """The verdict of the usual reward of a set on a response, with the answer read from a file as the set is published."""
    question, answer = COLUMNS.get(name, ("problem", "answer"))
    file = folder / "test.jsonl"
    file.write_text(json.dumps({question: "What is it?", answer: published}))
    usual = usual_evaluation(name)
    assert usual is not None
    [problem] = make("task", name, {**usual.options, "path": str(file)}).load()
    return make("reward", usual.reward, {**usual.reward_options, "seconds": 60.0})(response(problem, text))


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_read_as_a_person_would_read_them(name: str, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    assert len(ANSWERS[name]) >= 30
    wrong = [
        (published, text, right)
        for published, text, right, *_ in ANSWERS[name]
        if score(name, published, text, tmp_path) != float(right)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>so 3</think>\n<answer> 204 </answer>", "204"),
        (r"<answer>1</answer>, rather <answer>it is \boxed{2}</answer>", "2"),
        (r"\boxed{3} <answer>4</answer>", "4"),
        ("<answer></answer> The answer is 5.", "5"),
        (r"<think>perhaps \boxed{204}</think> I give up", None),
        (r"<think>\boxed{203}</think> It is \boxed{204}.", "204"),
        ("<answer>" * 20_000, None),
        (r"\boxed{1} or \boxed{2}", "1, 2"),
        (r"\boxed{1}. Then \boxed{2}", "2"),
        ("so\n#### 12 apples\n", "12 apples"),
        ("The answer is 3.5. Thanks", "3.5"),
        ("Answer: 7, since 7 is prime", "7"),
        ("the final answer is $x=4$.", "$x=4$"),
        ("first\n-3/4.", "-3/4."),
        ("So we get\n**204**", "204"),
        ("**it may be 204**", None),
        ("it may be 5", None),
        ("", None),
        (r"\boxed{" * 20_000, None),
    ],
)
def test_the_final_answer_is_found(text: str, expected: str | None) -> None:
    assert find_answer(text) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1,234", "1234"),
        (r"\$1{,}234.50", "1234.50"),
        (r"5\text{ cm}", "5"),
        ("18 dollars a day", "18"),
        (r"\left( 1 , 2 \right)", "(1,2)"),
        (r"\text{Ann}", "Ann"),
        (r"\sin t", r"\sin(t)"),
        ("x = 5.", "5"),
        (r"\textbf{(B) } 27", "27"),
        (r"(A) -\frac{1}{2}", r"(A) -\frac12"),
        (r"(C) \dfrac{3}{4}", r"\frac{3}{4}"),
    ],
)
def test_writings_of_one_answer_have_one_form(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


def test_brackets_that_are_no_choice_stay() -> None:
    assert normal_form("(A)") == "(A)" and normal_form("(3) 27") != "27" and normal_form(r"(A)\cup(B)") == r"(A)\cup(B)"


def test_numbers_are_compared_exactly_and_others_are_no_numbers() -> None:
    assert exact_value("0.1") == exact_value("1/10") == exact_value(r"\frac{1}{10}") == exact_value("1e-1")
    assert exact_value(r"3\times10^{2}") == exact_value("300")
    assert [exact_value(text) for text in ("1/0", "x", "", "9" * 1000, r"\frac{1}{0}")] == [None] * 5


def test_the_last_number_counts_only_in_a_finished_response() -> None:
    reward = make("reward", "math-answer", {"last_number": True})
    problem = Problem(prompt="?", answer="18")
    assert reward(response(problem, "she has 18 dollars")) == 1.0
    assert reward(replace(response(problem, "she has 18 dollars"), stop=StopReason.LENGTH)) == 0.0
    assert make("reward", "math-answer", {})(response(problem, "she has 18 dollars")) == 0.0
    assert reward(response(problem, "<think>18, I think</think> I do not know.")) == 0.0


def test_a_tolerance_of_the_reward_or_of_the_problem_allows_a_difference() -> None:
    text = r"\boxed{101}"
    assert make("reward", "math-answer", {})(response(Problem(prompt="?", answer="100"), text)) == 0.0
    assert (
        make("reward", "math-answer", {"relative_tolerance": 0.02})(response(Problem(prompt="?", answer="100"), text)) == 1.0
    )
    problem = Problem(prompt="?", answer="100", fields={"tolerance": 1.5})
    assert make("reward", "math-answer", {})(response(problem, text)) == 1.0


def test_without_math_verify_text_and_numbers_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.rewards.math.find_spec", lambda name: None)
    reward = make("reward", "math-answer", {})
    assert reward(response(Problem(prompt="?", answer="1/2"), r"\boxed{0.5}")) == 1.0
    assert reward(response(Problem(prompt="?", answer="x+1"), r"\boxed{1+x}")) == 0.0
