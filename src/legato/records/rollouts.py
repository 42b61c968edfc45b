"""Rollouts as the lines of a file."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from legato.core.rollout import Group, Rollout, Score, Unscorable


def records(groups: Iterable[Group], details: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Those a step was trained on, with what stood at their tokens where that is known."""
    plain = [
        record(member.rollout, member.score) | {"group": number}
        for number, group in enumerate(groups)
        for member in group.members
    ]
    return [{**each, **more} for each, more in zip(plain, details or repeat({}), strict=False)]


def record(rollout: Rollout, score: Score | Unscorable) -> dict[str, Any]:
    """One rollout with its score."""
    prompt = rollout.problem.prompt
    text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
    scored = not isinstance(score, Unscorable)
    dialogue = {} if rollout.dialogue is None else {"dialogue": list(rollout.dialogue)}
    return dialogue | {
        "key": rollout.problem.key,
        "prompt": text,
        "text": rollout.text,
        "answer": rollout.problem.answer,
        "reward": score.reward if isinstance(score, Score) else None,
        "accuracy": score.accuracy if isinstance(score, Score) else 0.0,
        "components": dict(score.components) if isinstance(score, Score) else {},
        "unscorable": None if scored else str(getattr(score, "reason", "")),
        "stop": rollout.stop.name.lower(),
        "tokens": len(rollout.tokens),
    }
