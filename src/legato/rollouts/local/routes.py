"""Which experts an engine sends each token to that it reads, noted on the way: K numbers of 8 bits a layer and token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.rollout import Routes
from legato.policy.experts.routers import Routers
from legato.rollouts.engine import Response


@contextmanager
def heard(routers: Routers | None, note: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside, `note` is given the number of each router and the experts [N, K] it chose, in the order they are passed."""

    def passed(number: int, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        note(number, output[2].to(index))

    with ExitStack() as stack:
        if routers is not None:
            index = routers.index
            for number, module in enumerate(routers.modules):
                stack.callback(module.register_forward_hook(partial(passed, number)).remove)
        yield


class WaveRoutes:
    """The routes of a wave of the plain engine: those of its prompts, then of one token of each row a pass."""

    def __init__(self, routers: Routers, places: int, rows: int, device: torch.device) -> None:
        self.routers = routers
        self.table = torch.zeros(places, rows, *routers.shape, dtype=routers.index, device=device)
        """[places, rows, M, K]; what stands beyond a row's length is never read."""
        self.prompts = self.table[0, :0]
        """[tokens of all prompts, M, K]"""
        self._latest: list[Tensor] = [self.prompts] * len(routers.modules)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with heard(self.routers, self._note):
            yield

    def _note(self, number: int, experts: Tensor) -> None:
        self._latest[number] = experts

    def first(self) -> None:
        """The prompts have been read."""
        self.prompts = torch.stack(self._latest, 1)

    def next(self, place: int, rows: Tensor) -> None:
        """The tokens at a place of these rows have been read."""
        self.table[place].index_copy_(0, rows, torch.stack(self._latest, 1))

    def added(self, responses: list[Response], prompts: Sequence[Tensor], owner: Tensor) -> list[Response]:
        """The responses with their routes."""
        ends = torch.tensor([0, *map(len, prompts)]).cumsum(0).tolist()
        first = [self.prompts[start:end].cpu() for start, end in pairwise(ends)]
        table, owners = self.table.transpose(0, 1).cpu(), owner.tolist()
        return [
            with_routes(response, prompts[of], first[of], table[row], self.routers.experts)
            for row, (response, of) in enumerate(zip(responses, owners, strict=True))
        ]


def with_routes(response: Response, prompt: Tensor, read: Tensor, written: Tensor, count: int) -> Response:
    """A response with the routes of its prompt and of its own tokens but the last, which was never read."""
    length = len(response.tokens) - 1
    tokens = torch.cat([prompt.cpu(), response.tokens])[:-1]
    return replace(response, routes=Routes(tokens=tokens, experts=torch.cat([read, written[:length]]), count=count))
