"""Reasoning Gym: reproducible problems, answers scored by its own rules, and model text that is never executed."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from legato.core.rollout import Problem, Rollout, Unscorable
from legato.rewards.gym import WORKER, ReasoningGymScore, tagged_answer
from legato.rewards.gym_worker import check_formula, evaluate_literal
from legato.tasks.gym import ReasoningGym
from legato.tasks.task import Task
from legato.workers.pool import shared
from tests.proof.responses import response

pytest.importorskip("reasoning_gym")

# One family for each pitfall: global random state, tuples in an entry, hash order, sympy, eval.
FAMILIES = ["chain_sum", "list_functions", "rearc", "word_ladder", "simple_integration", "spiral_matrix", "survo"]


def make_rollout(problem: Problem, text: str) -> Rollout:
    return response(problem, text)


def draw_problem(task: ReasoningGym, seed: int = 0) -> Problem:
    return task.problem(random.Random(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_answer_scores_1_and_another_does_not(family: str) -> None:
    task = ReasoningGym(dataset=family)
    for seed in range(3):
        problem = draw_problem(task, seed)
        assert ReasoningGymScore(seconds=60)(make_rollout(problem, f"let me see <answer>{problem.answer}</answer>")) == 1
        assert ReasoningGymScore(seconds=60)(make_rollout(problem, "<answer>no idea</answer>")) < 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_repeat_for_a_seed_and_differ_between_seeds(family: str) -> None:
    task = ReasoningGym(dataset=family)
    assert isinstance(task, Task)
    assert draw_problem(task, 1) == draw_problem(task, 1)
    assert draw_problem(task, 1).prompt != draw_problem(task, 2).prompt


def test_problems_do_not_depend_on_the_hash_seed() -> None:
    program = """
import random
from legato.tasks.gym import ReasoningGym
for name in ("word_ladder", "ransom_note", "isomorphic_strings"):
    print(ReasoningGym(dataset=name).problem(random.Random(3)))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_settings_reach_the_data_set_and_hash() -> None:
    task = ReasoningGym(dataset="chain_sum", settings={"min_terms": 3, "max_terms": 3})
    assert draw_problem(task).fields["metadata"]["num_terms"] == 3
    assert hash(task) == hash(ReasoningGym(dataset="chain_sum", settings=(("max_terms", 3), ("min_terms", 3))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "unknown dataset 'chain_sums'; did you mean 'chain_sum'?"),
        ({"dataset": "chain_sum", "settings": {"terms": 3}}, "unexpected keyword argument 'terms'"),
        ({"dataset": "chain_sum", "settings": {"min_terms": 9}}, "max_terms must be >= min_terms"),
        ({"dataset": "chain_sum", "settings": {"seed": 9}}, "settings.seed is drawn for each problem"),
        ({"dataset": "chain_sum", "settings": {"min_terms": {1}}}, "a mapping of names to text"),
        ({"dataset": " "}, "expected a text that is not empty"),
    ],
)
def test_invalid_options_are_refused_when_the_task_is_created(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        ReasoningGym(**options)
    assert message in str(refusal.value)


def test_a_problem_from_elsewhere_cannot_be_scored() -> None:
    verdict = ReasoningGymScore()(make_rollout(Problem(prompt="1+1=", answer="2"), "2"))
    assert isinstance(verdict, Unscorable)
    assert "not of reasoning-gym" in verdict.reason


def test_answers_are_extracted_from_the_last_tag_or_the_whole_text() -> None:
    problem = draw_problem(ReasoningGym(dataset="chain_sum"))
    tagged = make_rollout(problem, f"<answer>0</answer> no, <answer> {problem.answer} </answer>.")
    assert ReasoningGymScore(seconds=60)(tagged) == 1
    assert ReasoningGymScore(seconds=60, extract="whole")(tagged) < 1
    assert ReasoningGymScore(seconds=60, extract="whole")(make_rollout(problem, f" {problem.answer}\n")) == 1
    assert ReasoningGymScore(longest=10)(make_rollout(problem, "9" * 11)) == 0
    assert tagged_answer("no tag") == "no tag"
    assert tagged_answer("</answer> <answer>open") == "</answer> <answer>open"


@pytest.mark.parametrize("family", ["spiral_matrix", "string_insertion", "n_queens", "binary_matrix"])
def test_an_answer_is_never_run(family: str, tmp_path: Path) -> None:
    """Verified: without the replacement of `eval` this creates the folder."""
    mark = tmp_path / "mark"
    problem = draw_problem(ReasoningGym(dataset=family))
    text = f"[__import__('os').mkdir({str(mark)!r})]"
    assert ReasoningGymScore(seconds=60)(make_rollout(problem, text)) < 0.5
    assert not mark.exists()


@pytest.mark.parametrize("family", ["countdown", "puzzle24", "simple_integration", "polynomial_multiplication"])
def test_a_formula_is_never_run(family: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    problem = draw_problem(ReasoningGym(dataset=family))
    text = f"__import__('os').mkdir({str(mark)!r})"
    assert ReasoningGymScore(seconds=60)(make_rollout(problem, text)) < 0.5
    assert not mark.exists()


@pytest.mark.parametrize(
    "text", ["open(1)", "x.y", "().__class__", "exec(chr(1))", "'a'", "lambda: 1", "[1]", "3exec(1)", "x . y", "é"]
)
def test_texts_that_are_no_formula_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no f"):
        check_formula(text)


@pytest.mark.parametrize("text", ["3*x**2 - 1/2*sin(x) + C", "2.5*exp(-x)", "(1 + 2)*3", "x^2", "asin(x)+sqrt(2)"])
def test_formulas_are_accepted(text: str) -> None:
    check_formula(text)


def test_literals_are_read_and_nothing_else() -> None:
    assert evaluate_literal(" [[1, -2], ('a', {3: 0xa >> 1})]") == [[1, -2], ("a", {3: 5})]
    for text in ("f()", "x", "[i for i in (1,)]", "'a'.join('b')", "f'{1}'", "lambda: 1", "(x := 1)"):
        with pytest.raises(ValueError, match="is not allowed"):
            evaluate_literal(text)


def test_a_score_that_hangs_is_unscorable() -> None:
    problem = draw_problem(ReasoningGym(dataset="countdown"))
    ReasoningGymScore(seconds=60)(make_rollout(problem, "1"))
    assert ReasoningGymScore(seconds=0.5)(make_rollout(problem, "9**9**9**9")) == Unscorable("timed out after 0.5 s")
    assert ReasoningGymScore(seconds=60)(make_rollout(problem, problem.answer)) == 1
    assert len(shared(WORKER).processes) == 1


@pytest.mark.parametrize(
    ("what", "room"), [("ReasoningGym(dataset='chain_sum')", "tasks"), ("ReasoningGymScore()", "rewards")]
)
def test_without_the_package_it_says_what_to_install(what: str, room: str) -> None:
    program = f"""
import sys
sys.modules["reasoning_gym"] = None
from legato.{room}.gym import *
try:
    {what}
except ValueError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "pip install 'legato[gym]'" in process.stdout


@pytest.mark.slow
def test_every_family_repeats_problems_and_scores_its_own_answers() -> None:
    from reasoning_gym.factory import DATASETS

    for family in sorted(set(DATASETS) - {"composite"}):
        task = ReasoningGym(dataset=family)
        problem = draw_problem(task, 5)
        assert problem == draw_problem(task, 5), family
        if problem.answer is not None:
            verdict = ReasoningGymScore(seconds=60, extract="whole")(make_rollout(problem, problem.answer))
            assert verdict == 1, family
