"""Asynchronous copies of finished responses from the slots to the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.rollouts.engine import Handle, Job, Response, make_responses, token_versions
from legato.rollouts.gpu.slots import KVStore, Tables, device_ints
from legato.rollouts.local.routes import with_routes


@dataclass(slots=True, eq=False)
class Row:
    """A response that has a slot."""

    job: Job
    place: int
    """Index among the job's seeds."""
    slot: int
    entry: int
    """The entry of its prompt."""
    versions: list[tuple[int, int]]
    """(first token, policy version from that token on)"""
    reported: int = 0
    """How many tokens were reported before the end."""


class Landing:
    """Finished responses being copied. Their slots can be reused at once: the copies are enqueued first."""

    def __init__(self, store: KVStore, rows: Sequence[Row], width: int, *, truncated: bool) -> None:
        self.rows, self.routers = list(rows), store.routers
        index = device_ints([row.slot for row in rows], store.device)
        self.tokens = to_host(store.tokens[index, :width])
        self.logprobs = to_host(store.logprobs[index, :width])
        self.lengths = to_host(store.sampled_count[index])
        self.kept_logmass = to_host(store.kept_logmass[index, :width]) if truncated else None
        self.routes: Tensor | None = None
        """[rows, width, M, K]"""
        if store.routers is not None:
            self.routes = to_host(torch.stack([table[index, 0, :width] for table in _in_router_order(store.routes)], 2))
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
        """Wait for the copies and return the responses. Takes their items out of `cut`; `prompts` are prompts' routes."""
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
        versions = [token_versions(row.versions, length) for row, length in zip(self.rows, lengths, strict=True)]
        responses = make_responses(tokenizer, self.tokens, self.logprobs, self.kept_logmass, lengths, stops, texts, versions)
        if self.routes is not None:
            assert self.routers is not None
            responses = [
                with_routes(response, row.job.request.prompt, prompts[row.job.handle], routes_written, self.routers.experts)
                for row, response, routes_written in zip(self.rows, responses, self.routes, strict=True)
            ]
        return list(zip(self.rows, responses, strict=True))


def to_host(values: Tensor) -> Tensor:
    """Start a copy to the host without waiting. An event recorded afterwards says when it has arrived."""
    if not values.is_cuda:
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def prompt_routes(store: KVStore, entry: int, length: int) -> Tensor:
    """[P, M, K]: the experts of a prompt, being copied to the host. They arrive before any of its responses."""
    return to_host(torch.stack([table[entry, 0, :length] for table in _in_router_order(store.prompt_routes)], 1))


def _in_router_order(tables: Tables) -> list[Tensor]:
    return [tables[number] for number in range(len(tables))]
