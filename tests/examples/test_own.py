"""The examples of docs/extending.md keep the contracts of a task, a reward and an estimator."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import legato
from legato.config.kinds import make
from legato.rewards.scoring import Component, WeightedSum
from tests.proof.responses import response

EXAMPLES = Path(__file__).parents[2] / "examples"
PROBLEM = legato.Problem(prompt="12+30=", answer="42")


def scores(name: str, *texts: str) -> list[Any]:
    """The scores that a reward of own_rewards.py gives to responses of these texts."""
    reward = make("reward", f"{EXAMPLES / 'own_rewards.py'}:{name}", {})
    judge = WeightedSum(components={name: Component(reward=reward)})
    return judge.score_all([response(PROBLEM, text, len(text) + 1) for text in texts])


def test_a_task_draws_the_same_problem_from_the_same_state() -> None:
    task = make("task", f"{EXAMPLES / 'own_task.py'}:Doubles", {"largest": 5})
    first, second = (task.problem(random.Random(3)) for _ in range(2))
    assert first == second
    assert first.prompt == f"{int(first.answer) // 2}+{int(first.answer) // 2}=" and int(first.answer) <= 10


def test_a_plain_reward_pays_for_digits_that_agree() -> None:
    assert [score.reward for score in scores("near", "42", "49", "7", "")] == [1.0, 0.5, 0.0, 0.0]


def test_a_batched_reward_pays_short_right_answers_more() -> None:
    short, long, wrong = scores("shortest_right", "42", " 42 ", "7")
    assert short.reward > long.reward >= 1.0 > wrong.reward == 0.0


def test_an_async_reward_refuses_what_it_cannot_judge() -> None:
    assert [score.reward for score in scores("judged", "so 42", "41")] == [1.0, 0.0]


def test_the_median_is_not_moved_by_one_response() -> None:
    name = f"{EXAMPLES / 'own_estimator.py'}:MedianCentre"
    own = legato.algorithm("gspo", {"advantage": name, "advantage.scale": 2.0})
    rewards = torch.tensor([0.0, 0.0, 1.0, 100.0, 5.0, 5.0, 5.0, 5.0])
    advantages = legato.advantages(own, rewards=rewards, group=torch.arange(8) // 4).advantages
    assert advantages.tolist() == pytest.approx([-1.0, -1.0, 1.0, 199.0, 0.0, 0.0, 0.0, 0.0])


def test_the_environment_with_tools() -> None:
    import random

    from examples.word_tools import Vowels, Words
    from legato.core.rollout import StopReason
    from legato.rollouts.tool_calls import FORMATS

    problem = Words().problem(random.Random(0))
    environment = Vowels()
    (schema,) = environment.tools
    assert schema["function"]["parameters"]["properties"]["place"]["type"] == "integer"
    episode, read = environment.episode(problem), FORMATS["hermes"].read
    call = '<tool_call>{{"name": "letter", "arguments": {{"place": {}}}}}</tool_call>'
    said = [episode.act(read(call.format(place)), StopReason.END_TOKEN).content[0]["content"] for place in (0, 99)]
    assert said == [problem.fields["word"][0], "error: IndexError: string index out of range"]
    assert episode.act(read(str(problem.answer)), StopReason.END_TOKEN).reward == 1.0
