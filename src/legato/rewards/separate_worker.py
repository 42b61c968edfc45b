"""The other side of `separate.py`: imports the user's reward and calls it, as it runs in a worker (`workers/pool.py`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from legato.core.importing import code_at, imported_modules, make_imported
from legato.core.rollout import Unscorable
from legato.errors import InputError
from legato.rewards.scoring import check_reward, is_async, is_batched, judge_all
from legato.rewards.separate import rollout_from_json
from legato.rewards.trl import NotScored, Schedule, adapt_trl_reward


@lru_cache(maxsize=16)
def _reward(path: str, options: str, schedule: Schedule) -> Any:
    return adapt_trl_reward(make_imported("reward", path, json.loads(options)), schedule)


def answer(
    question: str,
    path: str,
    options: Mapping[str, Any],
    rollouts: Sequence[Mapping[str, Any]],
    schedule: Mapping[str, int],
) -> Any:
    """The reply to a question of the trainer: "describe" or "judge"."""
    updates = Schedule(**schedule)
    return describe(path, options, updates) if question == "describe" else judge(path, options, rollouts, updates)


def describe(path: str, options: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    """Whether the reward gets all rollouts at once, and its files; or why it is refused."""
    try:
        reward = _reward(path, json.dumps(options), schedule)
        check_reward(reward, path)
        code = code_at("reward", path)
    except InputError as error:
        return {"refused": str(error)}
    files = [] if code is None else [code, *imported_modules([code])]
    return {"batch": is_batched(reward) or is_async(reward), "code": [asdict(each) for each in files]}


def judge(
    path: str, options: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]], schedule: Schedule
) -> list[dict[str, float] | str | None]:
    """For each rollout a breakdown, the reason why it could not be scored, or None if the reward does not apply to it."""
    reward = _reward(path, json.dumps(options), schedule)
    return [_reply(verdict) for verdict in judge_all(reward, [rollout_from_json(record) for record in rollouts])]


def _reply(verdict: dict[str, float] | Unscorable) -> dict[str, float] | str | None:
    if isinstance(verdict, NotScored):
        return None
    return verdict.reason if isinstance(verdict, Unscorable) else verdict
