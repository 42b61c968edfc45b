"""Procedural problems: right answers, reproducible by seed, never in both the training and the held-out split."""

import random
from itertools import pairwise

import pytest

from legato.core.rollout import Problem
from legato.tasks.procedural import Arithmetic, Countdown, CountingDown, LetterCounting, Reversal, Sorting
from legato.tasks.task import Split, held_out

TASKS = [
    Arithmetic(),
    Arithmetic(operation="subtract"),
    Arithmetic(operation="multiply", left_digits=1),
    Reversal(),
    Reversal(symbols="letters"),
    Sorting(),
    CountingDown(),
    LetterCounting(),
    Countdown(),
]


def draw_problems(task: object, count: int, seed: int = 0) -> list[Problem]:
    source = random.Random(seed)
    return [task.problem(source) for _ in range(count)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.name}-{getattr(task, 'operation', '')}")
def test_problems_repeat_for_a_seed_and_differ_between_seeds(task: object) -> None:
    assert draw_problems(task, 50) == draw_problems(task, 50)
    assert draw_problems(task, 50) != draw_problems(task, 50, seed=1)


@pytest.mark.parametrize("operation", ["add", "subtract", "multiply"])
def test_arithmetic_is_right_and_has_the_configured_digits(operation: str) -> None:
    for problem in draw_problems(Arithmetic(operation=operation, left_digits=3, right_digits=2), 200):
        expression = problem.prompt.rstrip("=")
        assert str(eval(expression)) == problem.answer
        left, right = (part for part in expression.replace("-", "+").replace("*", "+").split("+"))
        assert (len(left), len(right)) == (3, 2)


def test_reversal_sorting_and_counting_are_right() -> None:
    for problem in draw_problems(Reversal(length=6), 50):
        assert problem.prompt == problem.answer[::-1] + "="
    for problem in draw_problems(Sorting(count=4, digits=2), 50):
        assert problem.answer.split() == sorted(problem.prompt.rstrip("=").split(), key=int)
    for problem in draw_problems(LetterCounting(), 50):
        letter, word = problem.prompt.rstrip("=").split(" in ")
        assert problem.answer == str(word.count(letter))


def test_counting_down_ends_above_zero_and_has_the_configured_length() -> None:
    lengths = set()
    for problem in draw_problems(CountingDown(least=5, most=9, largest_step=4), 300):
        step, start = (int(part) for part in problem.prompt.split(": "))
        numbers = [start, *map(int, (problem.answer or "").split())]
        assert all(after - before == step for before, after in pairwise(numbers))
        assert -4 <= step <= -2 and 0 <= numbers[-1] < -step
        lengths.add(len(numbers) - 1)
    assert lengths == set(range(5, 10))
    with pytest.raises(ValueError, match="least = 7 is above most = 6"):
        CountingDown(least=7)


def test_countdown_has_a_right_expression_of_its_numbers() -> None:
    for problem in draw_problems(Countdown(count=4), 200):
        assert eval(problem.answer) == problem.fields["target"]
        used = [
            int(x) for x in problem.answer.replace("(", "").replace(")", "").replace("-", "+").replace("*", "+").split("+")
        ]
        assert sorted(used) == sorted(problem.fields["numbers"])


def test_no_held_out_problem_is_trained_on() -> None:
    split = Split(task=Arithmetic(), share=0.3)
    held_out_keys = {problem.key for problem in split.held_out(200)}
    trained_keys = {problem.key for problem in (split.training_problem(0, number) for number in range(3000))}
    assert len(held_out_keys) == 200
    assert not held_out_keys & trained_keys
    assert len(trained_keys) > 500


def test_the_split_depends_on_the_prompt_alone() -> None:
    problem = Problem(prompt="1+1=", answer="2")
    assert held_out(problem, 0.5) == held_out(Problem(prompt="1+1=", answer="other", fields={"a": 1}), 0.5)
    assert not held_out(problem, 0.0)
    assert held_out(problem, 1.0)


def test_more_held_out_problems_than_the_task_has_is_refused() -> None:
    with pytest.raises(ValueError, match="held_out = 500 is more than the task has"):
        Split(task=Arithmetic(left_digits=1), share=0.2).held_out(500)


def test_the_key_of_chat_messages_does_not_depend_on_key_order() -> None:
    one = Problem(prompt=[{"role": "user", "content": "hi"}])
    other = Problem(prompt=[{"content": "hi", "role": "user"}])
    assert one.key == other.key != Problem(prompt="hi").key
