"""Scored rollouts as JSON and flat tensors: between ranks, in checkpoints and in a journal.

A problem and its prompt are not part of it: every rank has drawn them, and a resumed run draws them again. Only prompts
that an episode changed are.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import Rollout, Routes, Row, Score, StopReason, Unscorable
from legato.core.world import World
from legato.rewards.trl import NotScored
from legato.rollouts.episodes import Start

ScoredRollout = tuple[Rollout, Score | Unscorable]

_TENSORS = ("tokens", "sampler_logprobs", "version", "mask", "turn", "author", "kept_logmass")
_LISTS = ("turn_rewards", "turn_states", "dialogue")


def exchange(
    mine: Sequence[Sequence[ScoredRollout]], starts: Sequence[Start], world: World, first: int = 0
) -> list[list[ScoredRollout]]:
    """The scored rollouts of every start, in the order of `starts`; `mine` are those of this rank.

    Start k belongs to rank (first + k) modulo the ranks.
    """
    tensors: list[Tensor] = []
    own = starts[(world.rank - first) % world.size :: world.size]
    records = [[write_rollout(pair, start, tensors) for pair in row] for row, start in zip(mine, own, strict=True)]
    rows: list[list[ScoredRollout]] = [[] for _ in starts]
    for rank, (told, held) in enumerate(world.gather_tensors(records, tensors)):
        places = range((rank - first) % world.size, len(starts), world.size)
        if rank == world.rank:
            for place, row in zip(places, mine, strict=True):
                rows[place] = list(row)
            continue
        rest = iter(held)
        for place, row in zip(places, told, strict=True):
            rows[place] = [read_rollout(record, starts[place], rest) for record in row]
    return rows


def write_rollout(pair: ScoredRollout, start: Start, tensors: list[Tensor]) -> dict[str, Any]:
    """The JSON of a scored rollout; its tensors are appended."""
    rollout, score = pair
    return {
        "id": rollout.rollout_id,
        "rows": [_write_row(row, start, tensors) for row in rollout.rows],
        "text": rollout.text,
        "stop": rollout.stop.value,
        "temperature": rollout.temperature,
        "fault": rollout.fault,
        "server": rollout.server,
        # An opening of its episode is part of the prompt.
        "prompt": None if rollout.problem.prompt == start.problem.prompt else rollout.problem.prompt,
        **{name: getattr(rollout, name) for name in _LISTS},
        "kind": type(score).__name__,
        "score": asdict(score),
    }


def _write_row(row: Row | Rollout, start: Start, tensors: list[Tensor]) -> dict[str, Any]:
    same_prompt = torch.equal(row.prompt_tokens, start.prompt)
    names = _TENSORS if same_prompt else ("prompt_tokens", *_TENSORS)
    held = [name for name in names if getattr(row, name) is not None]
    tensors += [getattr(row, name) for name in held]
    if row.routes is not None:
        tensors += [row.routes.tokens, row.routes.experts]
    return {"held": held, "experts": None if row.routes is None else row.routes.count}


def _read_row(record: dict[str, Any], start: Start, tensors: Any) -> dict[str, Any]:
    """The fields of a row: the inverse of `_write_row`."""
    fields: dict[str, Any] = {"prompt_tokens": start.prompt} | {name: next(tensors) for name in record["held"]}
    if record["experts"] is not None:
        fields["routes"] = Routes(tokens=next(tensors), experts=next(tensors), count=record["experts"])
    return fields


_SCORES = {each.__name__: each for each in (Score, Unscorable, NotScored)}


def read_rollout(record: dict[str, Any], start: Start, tensors: Any) -> ScoredRollout:
    """The inverse of `write_rollout`; takes its tensors from the iterator."""
    *earlier, last = [_read_row(each, start, tensors) for each in record["rows"]]
    prompt = record["prompt"]
    rollout = Rollout(
        problem=start.problem if prompt is None else replace(start.problem, prompt=prompt),
        rollout_id=record["id"],
        earlier=tuple([Row(**fields) for fields in earlier]),
        text=record["text"],
        stop=StopReason(record["stop"]),
        temperature=record["temperature"],
        fault=record["fault"],
        server=record["server"],
        **{name: _as_tuple(record[name]) for name in _LISTS},
        **last,
    )
    fields = {name: _as_tuple(value) if name != "components" else value for name, value in record["score"].items()}
    return rollout, _SCORES[record["kind"]](**fields)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
