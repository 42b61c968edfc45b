"""Scored rollouts as JSON and flat tensors: between ranks, in checkpoints and in a journal.

A problem and its prompt are not part of it: every rank has drawn them, and a resumed run draws them again.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from legato.core.rollout import Rollout, Routes, Score, StopReason, Unscorable
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
    records = [[write_rollout(pair, tensors) for pair in row] for row in mine]
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


def write_rollout(pair: ScoredRollout, tensors: list[Tensor]) -> dict[str, Any]:
    """The JSON of a scored rollout; its tensors are appended."""
    rollout, score = pair
    held = [name for name in _TENSORS if getattr(rollout, name) is not None]
    tensors += [getattr(rollout, name) for name in held]
    if rollout.routes is not None:
        tensors += [rollout.routes.tokens, rollout.routes.experts]
    return {
        "id": rollout.rollout_id,
        "held": held,
        "experts": None if rollout.routes is None else rollout.routes.count,
        "text": rollout.text,
        "stop": rollout.stop.value,
        "temperature": rollout.temperature,
        "fault": rollout.fault,
        "server": rollout.server,
        **{name: getattr(rollout, name) for name in _LISTS},
        "kind": type(score).__name__,
        "score": asdict(score),
    }


_SCORES = {each.__name__: each for each in (Score, Unscorable, NotScored)}


def read_rollout(record: dict[str, Any], start: Start, tensors: Any) -> ScoredRollout:
    """The inverse of `write_rollout`; takes its tensors from the iterator."""
    held = {name: next(tensors) for name in record["held"]}
    routes = None
    if record["experts"] is not None:
        routes = Routes(tokens=next(tensors), experts=next(tensors), count=record["experts"])
    rollout = Rollout(
        problem=start.problem,
        prompt_tokens=start.prompt,
        rollout_id=record["id"],
        routes=routes,
        text=record["text"],
        stop=StopReason(record["stop"]),
        temperature=record["temperature"],
        fault=record["fault"],
        server=record["server"],
        **{name: _as_tuple(record[name]) for name in _LISTS},
        **held,
    )
    fields = {name: _as_tuple(value) if name != "components" else value for name, value in record["score"].items()}
    return rollout, _SCORES[record["kind"]](**fields)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
