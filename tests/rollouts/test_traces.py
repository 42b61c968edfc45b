"""Traces of an agent that owns its loop become rollouts with exactly the tokens that were sampled."""

from typing import Any

import pytest

from legato.core.batch import collate
from legato.core.rollout import Group, Problem, Score, Scored
from legato.errors import InputError
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.traces import rollout_of_traces, trace_of_answer

PROBLEM = Problem(prompt="x")


def trace(prompt: list[int], tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "node_id": "n", "prompt_token_ids": prompt, "completion_token_ids": tokens,
        "per_token_logps": [-0.5] * len(tokens), **more,
    }  # fmt: skip


def test_a_conversation_that_grows_is_one_row() -> None:
    traces = [trace([5, 6], [7, 1]), trace([5, 6, 7, 1, 9, 9], [8, 1], loss_mask=[1, 0])]
    rollout = rollout_of_traces(traces, problem=PROBLEM, rollout_id=3, rewards=[0.5, 1.0], version=4)
    assert rollout.earlier == () and rollout.prompt_tokens.tolist() == [5, 6]
    assert rollout.tokens.tolist() == [7, 1, 9, 9, 8, 1]
    assert rollout.mask.tolist() == [True, True, False, False, True, False]
    assert rollout.turn.tolist() == [0, 0, -1, -1, 1, -1] and rollout.author.tolist() == [0, 0, 2, 2, 0, 0]
    assert rollout.version.tolist() == [4, 4, -1, -1, 4, -1] and rollout.turn_rewards == (0.5, 1.0)


def test_a_prompt_that_was_rewritten_starts_a_row() -> None:
    traces = [trace([5, 6], [7, 1]), trace([5, 9], [8, 1]), trace([5, 9, 8, 1, 2], [3])]
    rollout = rollout_of_traces(traces, problem=PROBLEM, rollout_id=3, rewards=1.0, tokenizer=character_tokenizer())
    (first,) = rollout.earlier
    assert first.tokens.tolist() == [7, 1] and rollout.prompt_tokens.tolist() == [5, 9]
    assert rollout.tokens.tolist() == [8, 1, 2, 3] and rollout.turn.tolist() == [1, 1, -1, 2]
    assert rollout.turn_rewards == (0.0, 0.0, 1.0) and rollout.dialogue == ("4", "", "5", "", "0")
    other = rollout_of_traces([trace([5, 6], [4])], problem=PROBLEM, rollout_id=4, rewards=0.0)
    members = [
        Scored(rollout=each, score=Score(reward=0, accuracy=0, turn_rewards=each.turn_rewards)) for each in (rollout, other)
    ]
    batch = collate([Group(problem=PROBLEM, members=tuple(members))])
    assert batch.pieces == (2, 1) and batch.texts.siblings.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"per_token_logps": [-1.0]}, "expected 2 values, one for each sampled token, got 1"),
        ({"per_token_logps": [-1.0, float("nan")]}, "expected finite log-probs of at most 0, got nan"),
        ({"completion_token_ids": []}, "expected token ids, at least one"),
        ({"prompt_token_ids": "5 6"}, "expected a list, got '5 6'"),
        ({"loss_mask": [1]}, "expected 2 values"),
    ],
)
def test_a_trace_that_cannot_be_trained_on_is_named(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=f"{reason}.*trace 'n'"):
        rollout_of_traces([trace([5], [7, 1]) | more], problem=PROBLEM, rollout_id=0)


def test_an_answer_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="return_token_ids = true and logprobs = true"):
        trace_of_answer({"choices": [{"message": {"content": "x"}}]})
