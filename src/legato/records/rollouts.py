"""Rollouts as JSON records."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from legato.core.rollout import Group, Rollout, Score, Unscorable


def rollout_records(groups: Iterable[Group], details: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return a record for each rollout of a step; `details` (token by token) are merged into the first records."""
    plain = [
        rollout_record(member.rollout, member.score) | {"group": number}
        for number, group in enumerate(groups)
        for member in group.members
    ]
    return [{**each, **more} for each, more in zip(plain, details or repeat({}), strict=False)]


def rollout_record(rollout: Rollout, score: Score | Unscorable) -> dict[str, Any]:
    """Return the record of one rollout with its score."""
    prompt = rollout.problem.prompt
    text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
    scored = not isinstance(score, Unscorable)
    dialogue: dict[str, Any] = {} if rollout.dialogue is None else {"dialogue": list(rollout.dialogue)}
    rewards = (score.turn_rewards if isinstance(score, Score) else None) or rollout.turn_rewards
    if rollout.dialogue is not None and rewards is not None:
        dialogue["turn_rewards"] = list(rewards)
    # The turn that a reader wants to see of a chat; a prompt of one text has no other.
    users = [] if isinstance(prompt, str) else [str(each["content"]) for each in prompt if each["role"] == "user"]
    question = {"question": users[-1]} if users else {}
    return dialogue | {
        "key": rollout.problem.key,
        "prompt": text,
        "text": rollout.text,
        "answer": rollout.problem.answer,
        "reward": score.reward if isinstance(score, Score) else None,
        "accuracy": score.correctness if isinstance(score, Score) else 0.0,
        "components": dict(score.components) if isinstance(score, Score) else {},
        "unscorable": None if scored else str(getattr(score, "reason", "")),
        "stop": rollout.stop.name.lower(),
        "tokens": rollout.length,
        **question,
    }
