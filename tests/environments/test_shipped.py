"""The environments that are shipped: their rules, their tasks, and the demonstrations for warm-up."""

import random
from pathlib import Path
from typing import Any

import pytest

from legato.config.kinds import make
from legato.config.load import load
from legato.core.rollout import Problem, StopReason
from legato.environments.search import rank
from legato.rollouts.tool_calls import FORMATS
from legato.run import wire

END = StopReason.END_TOKEN
NAMES = {"guess": "secret-number", "calculator": "arithmetic", "maze": "maze", "search": "facts"}


def answer(episode: Any, text: str) -> Any:
    return episode.act(FORMATS["plain"].read(text), END) if hasattr(episode, "act") else episode.reply(text, END)


def test_the_guessing_game() -> None:
    problem = Problem(prompt="game 1:", answer="6", fields={"largest": 9})
    episode = make("environment", "guess", {}).episode(problem)
    replies = [episode.reply(text, END) for text in ("4", "x", "8", "6")]
    assert [reply.content for reply in replies] == ["more:", "a number:", "less:", ""]
    assert [reply.state for reply in replies] == [(5, 9), (5, 9), (5, 7), None]
    assert [reply.reward for reply in replies] == [0, 0, 0, 1] and replies[-1].done


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("calc(12*34)", "408"),
        ("calc(-2+3*4)", "10"),
        ("calc(9**9**9)", "error: ValueError: expected whole numbers with +, - and *"),
        ("calc(__import__('os'))", "error: ValueError: expected whole numbers with +, - and *"),
        ("calc(10" + "*10" * 13 + ")", "error: ValueError: expected values up to 1000000000000"),
        ("calc(1" + "+1" * 99 + ")", "error: ValueError: expected at most 100 characters, got 199"),
        ("solve(1)", "error: expected one of the tools calc, got 'solve'"),
    ],
)
def test_the_calculator(call: str, result: str) -> None:
    episode = make("environment", "calculator", {}).episode(Problem(prompt="12*34=", answer="408"))
    assert answer(episode, call).content[0]["content"] == result
    assert answer(episode, "408").reward == 1.0


def test_the_maze_is_walked_by_its_answer_and_walls_hold() -> None:
    task, source = make("task", "maze", {"walls": 8}), random.Random(0)
    for _ in range(20):
        problem = task.problem(source)
        episode = make("environment", "maze", {"step_cost": 0.05}).episode(problem)
        replies = [answer(episode, way) for way in str(problem.answer)]
        assert replies[-1].done and sum(reply.reward for reply in replies) == pytest.approx(1 - 0.05 * len(replies))
        episode = make("environment", "maze", {}).episode(problem)
        start = tuple(problem.fields["start"])
        closed = [way for way in "nesw" if [*start, way] not in [list(door) for door in problem.fields["doors"]]]
        assert all(answer(episode, way).state == start for way in closed)


def test_the_search(tmp_path: Path) -> None:
    problem = make("task", "facts", {}).problem(random.Random(1))
    name = str(problem.prompt)[len("age of ") : -1]
    episode = make("environment", "search", {}).episode(problem)
    assert answer(episode, f"search({name})").content[0]["content"] == f"{name} is {problem.answer}."
    assert answer(episode, "search(nobody knows)").content[0]["content"] == "nothing."
    assert answer(episode, str(problem.answer)).reward == 1.0
    (tmp_path / "a.txt").write_text("Bees live in hives.\n\nA hive has one queen.")
    own = make("environment", "search", {"documents": str(tmp_path)}).episode(Problem(prompt="?", answer="queen"))
    assert answer(own, "search(queen of the hive)").content[0]["content"] == "A hive has one queen."
    assert rank("b", ["a b", "b", "c"]) == ["b", "a b"]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_warms_up_and_takes_a_step(name: str) -> None:
    small = {"policy.tiny.hidden": 32, "training.prompts_per_step": 2, "training.updates_per_step": 1, "task.held_out": 4}
    recipe = Path(__file__).parents[2] / "recipes" / f"tiny-{name}.toml"
    resolved = load([recipe], (), small)
    assert resolved.config.task.kind == NAMES[name] and resolved.config.reward.kind == "environment"
    policy, source = wire.policy_of(resolved, wire.PythonObjects()), wire.source_of(resolved.config, wire.PythonObjects())
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, wire.PythonObjects()))
    examples = wire.warm_up_examples(resolved.config, policy, source, collector)(0)
    words = policy.tokenizer
    said = {words.decode(response, skip_special_tokens=True).partition("(")[0] for _, response in examples}
    assert ({"calculator": "calc", "search": "search"}.get(name) or next(iter(said))) in said
    if name == "calculator":
        after = [words.decode(prompt) for prompt, _ in examples if "calc(" in words.decode(prompt)]
        assert after and all(text.rpartition("<end>")[2].lstrip("-").isdigit() for text in after)
    report = wire.trainer_of(resolved, policy, collector, None).step()
    assert report.metrics["rollouts/unscorable"] == 0
