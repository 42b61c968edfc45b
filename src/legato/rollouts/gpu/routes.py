"""The routes of one call of the GPU engine, taken out of the store before its places go to others."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from legato.rollouts.engine import Request, Response
from legato.rollouts.gpu.slots import Store, Tables
from legato.rollouts.local.routes import with_routes


class CallRoutes:
    """Those of the prompts by request, those of the responses by row."""

    def __init__(self, memory: Store, rows: int, width: int) -> None:
        assert memory.routers is not None
        self.memory, self.routers, self.width = memory, memory.routers, width
        self.prompts: dict[int, Tensor] = {}
        """request -> [P, M, K]"""
        self.table = torch.zeros(rows, width, *self.routers.shape, dtype=self.routers.index, device=memory.device)

    def read(self, entries: Mapping[int, int], requests: Sequence[Request]) -> None:
        """The prompts of these requests lie in these entries now."""
        for number, entry in entries.items():
            length = len(requests[number].prompt)
            self.prompts[number] = torch.stack(
                [table[entry, 0, :length] for table in _ordered(self.memory.prompt_routes)], 1
            )

    def collect(self, rows: Tensor, slots: Tensor) -> None:
        """The responses in these slots have ended."""
        self.table[rows] = torch.stack([table[slots, 0, : self.width] for table in _ordered(self.memory.routes)], 2)

    def added(self, responses: Sequence[Response], owners: Sequence[int], requests: Sequence[Request]) -> list[Response]:
        """The responses with their routes; `owners` are their requests."""
        read, written = {number: experts.cpu() for number, experts in self.prompts.items()}, self.table.cpu()
        return [
            with_routes(response, requests[of].prompt, read[of], written[row], self.routers.experts)
            for row, (response, of) in enumerate(zip(responses, owners, strict=True))
        ]


def _ordered(tables: Tables) -> list[Tensor]:
    return [tables[number] for number in range(len(tables))]
