"""Finished responses on their way from the slots to the host: copied without waiting, read a look later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.rollouts.engine import Handle, Job, Response, make_responses
from legato.rollouts.gpu.slots import Store, Tables, numbers
from legato.rollouts.local.routes import with_routes


@dataclass(slots=True, eq=False)
class Row:
    """A response that was given a slot."""

    job: Job
    place: int
    """Which of the job's seeds."""
    slot: int
    entry: int
    """Where the prompt lies."""
    versions: list[tuple[int, int]]
    """(first token, policy version that sampled it and those after it)"""


class Landing:
    """Some finished responses; their slots may go to others at once, since the copies are enqueued before."""

    def __init__(self, store: Store, rows: Sequence[Row], width: int, *, kept: bool) -> None:
        self.rows, self.routers = list(rows), store.routers
        index = numbers([row.slot for row in rows], store.device)
        self.tokens = to_host(store.tokens[index, :width])
        self.logprobs = to_host(store.logprobs[index, :width])
        self.lengths = to_host(store.written[index])
        self.kept = to_host(store.kept[index, :width]) if kept else None
        self.routes: Tensor | None = None
        """[rows, width, M, K]"""
        if store.routers is not None:
            self.routes = to_host(torch.stack([table[index, 0, :width] for table in _ordered(store.routes)], 2))
        self.event = torch.cuda.Event() if store.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self.event is not None:
            self.event.record()

    def wait(
        self,
        tokenizer: Any,
        end_tokens: Sequence[int],
        cut: dict[Row, tuple[int, str]],
        prompts: Mapping[Handle, Tensor],
    ) -> list[tuple[Row, Response]]:
        """The responses, once the copies are there. What `cut` holds of them is taken out; `prompts` are prompts' routes."""
        if self.event is not None:
            self.event.synchronize()
        lengths, ends = self.lengths.tolist(), set(end_tokens)
        stops = [
            StopReason.END_TOKEN if int(self.tokens[place, length - 1]) in ends else StopReason.LENGTH
            for place, length in enumerate(lengths)
        ]
        texts = {}
        for place, row in enumerate(self.rows):
            if row in cut:
                lengths[place], texts[place] = cut.pop(row)
                stops[place] = StopReason.STOP_STRING
        versions = [_version_of(row.versions, length) for row, length in zip(self.rows, lengths, strict=True)]
        responses = make_responses(tokenizer, self.tokens, self.logprobs, self.kept, lengths, stops, texts, versions)
        if self.routes is not None:
            assert self.routers is not None
            responses = [
                with_routes(response, row.job.request.prompt, prompts[row.job.handle], written, self.routers.experts)
                for row, response, written in zip(self.rows, responses, self.routes, strict=True)
            ]
        return list(zip(self.rows, responses, strict=True))


def _version_of(versions: Sequence[tuple[int, int]], length: int) -> Tensor:
    """[length]: the version of each token, from the places at which versions began."""
    table = torch.empty(length, dtype=torch.int64)
    for start, version in versions:
        table[start:] = version
    return table


def to_host(values: Tensor) -> Tensor:
    """A copy on the host that is not waited for; an event recorded after it says when it is there."""
    if not values.is_cuda:
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def prompt_routes(store: Store, entry: int, length: int) -> Tensor:
    """[P, M, K]: the experts of a prompt, on their way to the host. They are there before any of its responses is."""
    return to_host(torch.stack([table[entry, 0, :length] for table in _ordered(store.prompt_routes)], 1))


def _ordered(tables: Tables) -> list[Tensor]:
    return [tables[number] for number in range(len(tables))]
