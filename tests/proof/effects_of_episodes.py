"""Effects of the options of environments, teachers, sampling ahead and servers' models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.errors import InputError
from legato.run import wire
from tests.proof import verdicts
from tests.proof.effects import Bench, effect

GUESS: dict[str, Any] = {
    "algorithm": "turn-gspo",
    "algorithm.advantage": "turn-return",
    "task.environment": "guess",
    "rollouts.max_response_tokens": 40,
}


def episodes(bench: Bench, options: dict[str, Any]) -> list[Any]:
    """The rollouts of one step of the guessing game."""
    run = bench.run({**GUESS, **options})
    return [member.rollout for group in run.reports[0].groups for member in group.members]


def turns(rollouts: list[Any]) -> int:
    """The most turns of any rollout."""
    return max(int(row.turn.max()) for rollout in rollouts for row in rollout.rows) + 1


@effect("task.environment_options")
def options_of_an_environment(bench: Bench) -> None:
    few = bench.build_run({**GUESS, "task.environment_options": {"guesses": 2}}).collector.runner.environment
    many = bench.build_run({**GUESS, "task.environment_options": {"guesses": 5}}).collector.runner.environment
    assert few.max_turns == 2 and many.max_turns == 5
    with pytest.raises(InputError, match="guesse"):
        bench.build_run({**GUESS, "task.environment_options": {"guesse": 2}})


@effect("task.max_turns")
def the_most_turns(bench: Bench) -> None:
    # The stop string makes turns short, so that several fit.
    short = {"rollouts.stop": ["1", "2", "3", "4", "5", "e", "a"], "task.environment_options": {"guesses": 6}}
    assert turns(episodes(bench, short)) > 1
    assert turns(episodes(bench, {**short, "task.max_turns": 1})) == 1


@effect("task.max_turn_tokens")
def the_longest_turn(bench: Bench) -> None:
    rollouts = episodes(bench, {"task.max_turn_tokens": 2})
    sampled = [int((rollout.turn == turn).sum()) for rollout in rollouts for turn in range(2)]
    assert max(sampled) <= 2
    assert max(int((rollout.turn == 0).sum()) for rollout in episodes(bench, {})) > 2


@effect("task.episode_seconds")
def the_time_of_an_episode(bench: Bench) -> None:
    short = {"rollouts.stop": ["1", "2", "3", "4", "5", "e", "a"], "task.environment_options": {"guesses": 6}}
    assert turns(episodes(bench, {**short, "task.episode_seconds": 1e-9})) == 1


@effect("task.step_separator")
def the_steps_of_a_response(bench: Bench) -> None:
    options = {"algorithm": "turn-gspo", "algorithm.advantage": "turn-return", "rollouts.max_response_tokens": 40}
    # A number for each step: the longer ones are better.
    options["reward.kind"] = f"{verdicts.__file__}:lengths_of_steps"
    report = bench.run({**options, "task.step_separator": "e"}).reports[0]
    rollouts = [member.rollout for group in report.groups for member in group.members]
    assert turns(rollouts) > 1
    for row, rollout in enumerate(rollouts):
        steps = list((rollout.dialogue or (rollout.text,))[::2])
        assert "".join(steps) == rollout.text and all(step.endswith("e") for step in steps[:-1])
        credit = report.tensors["advantages"][row, : len(rollout.tokens)]
        assert all(len(set(credit[rollout.turn == step].tolist())) == 1 for step in range(len(steps)))
    assert len(set(report.tensors["advantages"][report.tensors["mask"]].tolist())) > len(rollouts)
    with pytest.raises(InputError, match="reads turns"):
        bench.build_run(options)
    with pytest.raises(InputError, match="expected no environment beside it"):
        bench.build_run({**GUESS, "task.step_separator": "e"})


@effect("task.train_on_cut")
def whether_cut_episodes_are_trained_on(bench: Bench) -> None:
    # The reward counts digits, so that responses of one group differ; nearly all of them are cut.
    cut = {"algorithm": "gspo", "task.environment": "guess", "rollouts.max_response_tokens": 3, "rollouts.stop": []}
    cut["reward.kind"] = f"{verdicts.__file__}:early"
    trained, left_out = (
        bench.run({**cut, "task.train_on_cut": trained}).steps[0]["gradient/norm"] for trained in (True, False)
    )
    assert trained > left_out


@effect("task.tool_format")
def the_format_of_tool_calls(bench: Bench) -> None:
    calculator = {"task.environment": "calculator"}
    for name in ("hermes", "plain"):
        rendering = bench.build_run({**calculator, "task.tool_format": name}).collector.runner.rendering
        assert rendering.tool_calls.name == name


@effect("rollouts.ahead")
def sampling_ahead(bench: Bench) -> None:
    straight, ahead = (bench.run({"rollouts.ahead": k, "training.steps": 3}).steps for k in (0, 1))
    assert not any("lag/max" in step for step in straight)
    assert [step["lag/max"] for step in ahead] == [0.0, 1.0, 1.0]


@effect("policy.tiny.tied")
def whether_the_head_is_tied(bench: Bench) -> None:
    for tied in (True, False):
        model = bench.build_run({"policy.tiny.tied": tied}).policy.model
        same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert same is tied


def save_teacher(bench: Bench) -> Path:
    """A folder with a model of other weights."""
    folder = bench.folder / "teacher"
    policy = bench.build_run({"training.seed": 9}, wire.PythonObjects()).policy
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def advantages(bench: Bench, options: dict[str, Any]) -> torch.Tensor:
    """The advantages of one step."""
    report = bench.run({"algorithm": "gspo-token", **options}).reports[0]
    table: torch.Tensor = report.tensors["advantages"]
    return table


@effect("teacher.model", "teacher.weight", "teacher.reward_weight", "teacher.baseline")
def advantages_of_a_teacher(bench: Bench) -> None:
    folder = str(save_teacher(bench))
    alone = {"teacher.model": folder, "teacher.reward_weight": 0.0}
    without, taught, twice, unbased, both = (
        advantages(bench, options)
        for options in (
            {},
            alone,
            {**alone, "teacher.weight": 2.0},
            {**alone, "teacher.baseline": "none"},
            {"teacher.model": folder, "teacher.reward_weight": 1.0},
        )
    )
    assert without.shape[1] == 1 or bool((without == without[:, :1]).all()), "one advantage for a response"
    assert taught.shape[1] > 1 and bool((taught.std(1) > 0).any()), "one for each token"
    torch.testing.assert_close(twice, 2 * taught)
    assert not torch.allclose(unbased, taught)
    torch.testing.assert_close(both, torch.where(both == 0, both, taught + without))


@effect("teacher.use")
def a_teacher_as_reference(bench: Bench) -> None:
    folder = str(save_teacher(bench))
    penalties = {"algorithm": "grpo", "algorithm.objective.penalties": ["kl"]}
    own, other = (
        bench.run({**penalties, **options}).reports[0].tensors["ref_logprobs"]
        for options in ({}, {"teacher.model": folder, "teacher.use": "penalty"})
    )
    assert not torch.allclose(own, other), "another model is the reference"
