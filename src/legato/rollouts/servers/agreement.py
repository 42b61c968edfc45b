"""What the ranks of a run tell each other of servers.

Every rank asks the servers for its own share of the groups. Rank 0 alone starts servers, publishes weights and brings
servers back; the others take over what it found. With one rank everything here is the rank's own.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.core.world import World
from legato.errors import InputError
from legato.rollouts.engine import Response
from legato.rollouts.servers.errors import RefusedError, ServerError
from legato.rollouts.servers.member import Counts
from legato.rollouts.servers.probe import ProbeReply

Loaded = ProbeReply | ServerError | InputError
"""What became of a server that was given new weights."""


def share_loaded(world: World, results: Sequence[Loaded]) -> list[Loaded]:
    """What rank 0 learned of each server, on all ranks. The other ranks have no results of their own."""
    if world.size == 1:
        return list(results)
    records: list[Any] = []
    tensors: list[Tensor] = []
    for result in results:
        if isinstance(result, ProbeReply):
            response = result.response
            tensors += [result.scores, *([] if response is None else [response.tokens, response.logprobs])]
            records.append({"responds": response is not None})
        else:
            # A refusal ends the run as an InputError does.
            records.append({"problem": str(result), "is_final": isinstance(result, InputError | RefusedError)})
    told, held = world.gather_tensors(records, tensors)[0]
    if world.rank == 0:
        return list(results)
    rest = iter(held)
    return [_read(record, rest) for record in told]


def _read(record: dict[str, Any], tensors: Any) -> Loaded:
    if "problem" in record:
        return (InputError if record["is_final"] else ServerError)(record["problem"])
    scores, response = next(tensors), None
    if record["responds"]:
        tokens = next(tensors)
        response = Response(
            tokens=tokens,
            logprobs=next(tensors),
            kept_logmass=None,
            text="",
            stop=StopReason.LENGTH,
            version=torch.zeros_like(tokens),
        )
    return ProbeReply(scores=scores, response=response)


def merge_counts(world: World, counts: Sequence[Counts]) -> list[Counts]:
    """What happened at each server, over all ranks. Each rank notices for itself that a server is gone: it went once."""
    if world.size == 1:
        return list(counts)
    every = world.gather([asdict(each) for each in counts])
    return [
        Counts(
            **{
                name: (max if name in _NOTICED_BY_ALL else sum)(rank[server][name] for rank in every)
                for name in asdict(counts[server])
            }
        )
        for server in range(len(counts))
    ]


_NOTICED_BY_ALL = ("drops", "rejoins", "restarts")
