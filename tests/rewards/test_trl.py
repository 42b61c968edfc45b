"""Rewards written for TRL work as they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from legato.config.from_trl import Translation
from legato.config.load import load
from legato.core.batch import collate
from legato.core.rollout import Group, Problem, Rollout, Score, Scored, Unscorable
from legato.errors import InputError
from legato.rewards import separate_worker
from legato.rewards.scoring import Component, WeightedSum, check_reward, judge_all
from legato.rewards.separate import rollout_as_json
from legato.rewards.trl import NotScored, Schedule, adapt_trl_reward, has_trl_signature
from legato.run import train, wire
from tests.proof.responses import response

TEXT = Problem(prompt="2+3=", answer="5", fields={"level": 1})
CHAT = Problem(prompt=[{"role": "user", "content": "2+3="}], fields={"solution": 5, "level": 2})


def all_of_it(prompts: Any, completions: Any, completion_ids: Any, level: Any, trainer_state: Any, **rest: Any) -> list:
    rest["log_extra"]("level", level)
    rest["log_metric"]("share", 0.5)
    assert len(prompts) == len(completions) == len(completion_ids) == len(level) == len(rest["answer"])
    all_of_it.seen = {"prompts": prompts, "completions": completions, "level": level, "state": trainer_state, **rest}
    return [float(number) for number in level]


async def later(completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(each)) for each in completions]


def without_rest(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


class Callable_:
    def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
        return [1.0 for _ in completions]


def ours(rollout: Rollout) -> float:
    return float(rollout.text == "5")


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (all_of_it, True),
        (later, True),
        (without_rest, True),
        (Callable_(), True),
        (lambda completion_ids, **kwargs: [], True),
        (ours, False),
        (lambda completions: 0.0, False),
        (lambda rollout, **kwargs: 0.0, False),
        (len, False),
        (3, False),
    ],
)
def test_the_signature_of_trl_is_recognised_by_its_parameters(reward: Any, expected: bool) -> None:
    assert has_trl_signature(reward) is expected
    assert (adapt_trl_reward(reward) is not reward) is expected


def test_everything_trl_passes_arrives_by_name() -> None:
    reward = adapt_trl_reward(all_of_it, Schedule(updates_per_step=4, total_updates=40))
    check_reward(reward, "all_of_it")
    assert judge_all(reward, [response(TEXT, "5"), response(CHAT, "6")]) == [{"": 1.0}, {"": 2.0}]
    seen = all_of_it.seen
    assert seen["prompts"] == ["2+3=", [{"role": "user", "content": "2+3="}]]
    assert seen["completions"] == ["5", [{"role": "assistant", "content": "6"}]]
    assert seen["answer"] == ["5", None]
    assert seen["solution"] == [None, 5]
    assert (seen["state"].global_step, seen["state"].max_steps) == (0, 40)


@pytest.mark.parametrize(("reward", "values"), [(later, [1.0, 3.0]), (without_rest, [1.0, 0.0]), (Callable_(), [1.0, 1.0])])
def test_async_rewards_objects_and_functions_of_few_columns_score(reward: Any, values: list[float]) -> None:
    assert judge_all(adapt_trl_reward(reward), [response(TEXT, "5"), response(TEXT, "125")]) == [{"": v} for v in values]


def picky(index: int) -> Callable[..., list[float | None]]:
    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [1.0 if text[index] == "1" else None for text in completions]

    return reward


def test_none_is_not_scored_and_other_rewards_still_count() -> None:
    rewards = {name: Component(reward=adapt_trl_reward(picky(place)), weight=w) for place, (name, w) in enumerate(
        [("first", 2.0), ("second", 0.5)]
    )}  # fmt: skip
    scores = WeightedSum(components=rewards).score_all([response(TEXT, text) for text in ("11", "10", "01", "00")])
    assert [score.reward for score in scores if isinstance(score, Score)] == [2.5, 2.0, 0.5]
    assert [score.accuracy for score in scores if isinstance(score, Score)] == [1.0, 1.0, 1.0]
    assert isinstance(scores[3], Unscorable) and "each returned None" in scores[3].reason
    alone = WeightedSum(components={"first": rewards["first"]}).score_all([response(TEXT, "00"), response(TEXT, "10")])
    assert alone[0] == Unscorable("first: returned None: it does not score this response")
    assert isinstance(alone[1], Score)


def test_a_batch_knows_which_rewards_did_not_apply() -> None:
    """Also one that applies to no response of the batch: the weights of GDPO still find as many components."""
    rewards = {"c": picky(0), "b": picky(1), "a": picky(2), "parts": lambda rollout: {"x": 1.0}}
    components = {name: Component(reward=adapt_trl_reward(each, Schedule())) for name, each in rewards.items()}
    rollouts = [response(TEXT, text) for text in ("100", "110", "010")]
    scores = WeightedSum(components=components).score_all(rollouts)
    assert [score.absent for score in scores if isinstance(score, Score)] == [("b", "a"), ("a",), ("c", "a")]
    members = tuple(Scored(rollout=rollout, score=score) for rollout, score in zip(rollouts, scores, strict=True))
    columns = collate([Group(problem=TEXT, members=members)]).components
    assert {name: str(column.tolist()) for name, column in columns.items()} == {
        "a": "[nan, nan, nan]",
        "b": "[nan, 1.0, 1.0]",
        "c": "[1.0, 1.0, nan]",
        "parts/x": "[1.0, 1.0, 1.0]",
    }
    assert list(columns) == sorted(columns)


def test_weights_of_a_list_of_rewards_follow_the_names_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    translations: list[Translation] = []

    def stop(translation: Translation, *rest: Any) -> None:
        translations.append(translation)
        raise InputError("stop")

    monkeypatch.setattr(train, "resolve_trl", stop)
    trl = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.1, 1.0, 2.0]}
    with pytest.raises(InputError, match="stop"):
        train.train(problems=[{"prompt": "2+3="}], reward=[without_rest, later, later], trl=trl)
    assert translations[0].reward_names == ["without_rest", "later", "later-3"]
    assert translations[0].options["algorithm.advantage.weights"] == [1.0, 2.0, 0.1]


@pytest.mark.parametrize("make", [numpy.array, torch.tensor], ids=["numpy", "torch"])
def test_nan_in_an_array_is_not_scored(make: Callable[[list[float]], Any]) -> None:
    def array(completions: Any, **kwargs: Any) -> Any:
        return make([float("nan"), 0.5])

    first, second = judge_all(adapt_trl_reward(array), [response(TEXT, "5"), response(TEXT, "6")])
    assert isinstance(first, NotScored) and second == {"": 0.5}


def test_a_wrong_number_of_rewards_scores_nothing() -> None:
    verdict = judge_all(adapt_trl_reward(lambda completions, **kwargs: [1.0]), [response(TEXT, "5")] * 2)[0]
    assert isinstance(verdict, Unscorable) and "1 verdicts for 2 rollouts" in verdict.reason


REWARD_FILE = """
def right(prompts, completions, answer, **kwargs):
    return [None if a == "?" else float(c == a) for c, a in zip(completions, answer)]
"""


def test_a_reward_file_of_trl_is_named_in_reward_kind(tmp_path: Path) -> None:
    file = tmp_path / "trl_rewards.py"
    file.write_text(REWARD_FILE)
    rollouts = [response(TEXT, "5"), response(TEXT, "6"), response(Problem(prompt="?", answer="?"), "5")]
    reward = wire.reward_of(load([], [f"reward.kind={file}:right"]).config, wire.PythonObjects())
    first, second, third = reward.score_all(rollouts)
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert third == Unscorable("right: returned None: it does not score this response")
    assert "'right' has TRL's signature" in wire.reward_notes(reward)[0]
    # In a process of its own, None arrives as None.
    records = [rollout_as_json(rollout) for rollout in rollouts]
    assert separate_worker.judge(f"{file}:right", {}, records, Schedule()) == [{"": 1.0}, {"": 0.0}, None]
