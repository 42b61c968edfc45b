"""Records which experts each token is routed to while an engine decodes: K bytes per layer and token."""

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
def listen_to_routers(routers: Routers | None, note: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `note(router number, experts [N, K])` for every router pass inside the context, in forward order."""

    def hook(number: int, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        note(number, output[2].to(index))

    with ExitStack() as stack:
        if routers is not None:
            index = routers.index
            for number, module in enumerate(routers.modules):
                stack.callback(module.register_forward_hook(partial(hook, number)).remove)
        yield


class WaveRoutes:
    """The routes of one wave of the plain engine: first those of its prompts, then of one token per row and pass."""

    def __init__(self, routers: Routers, places: int, rows: int, device: torch.device) -> None:
        self.routers = routers
        self.table = torch.zeros(places, rows, *routers.shape, dtype=routers.index, device=device)
        """[places, rows, M, K]; values beyond a row's length are never read."""
        self.prompts = self.table[0, :0]
        """[tokens of all prompts, M, K]"""
        self._latest: list[Tensor] = [self.prompts] * len(routers.modules)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with listen_to_routers(self.routers, self._note):
            yield

    def _note(self, number: int, experts: Tensor) -> None:
        self._latest[number] = experts

    def first(self) -> None:
        """Store the routes of the prompt pass that has just run."""
        self.prompts = torch.stack(self._latest, 1)

    def next(self, place: int, rows: Tensor) -> None:
        """Store the routes of the decode pass that has just read the tokens of `rows` at `place`."""
        self.table[place].index_copy_(0, rows, torch.stack(self._latest, 1))

    def add_routes(self, responses: list[Response], prompts: Sequence[Tensor], owner: Tensor) -> list[Response]:
        """The responses with their routes filled in. `owner` [n] is the prompt of each response."""
        ends = torch.tensor([0, *map(len, prompts)]).cumsum(0).tolist()
        first = [self.prompts[start:end].cpu() for start, end in pairwise(ends)]
        table, owners = self.table.transpose(0, 1).cpu(), owner.tolist()
        return [
            with_routes(response, prompts[prompt], first[prompt], table[row], self.routers.experts)
            for row, (response, prompt) in enumerate(zip(responses, owners, strict=True))
        ]


def with_routes(
    response: Response, prompt: Tensor, prompt_experts: Tensor, response_experts: Tensor, count: int
) -> Response:
    """The response with the routes of its prompt and of all its tokens but the last, which the model never read."""
    length = len(response.tokens) - 1
    tokens = torch.cat([prompt.cpu(), response.tokens])[:-1]
    return replace(
        response, routes=Routes(tokens=tokens, experts=torch.cat([prompt_experts, response_experts[:length]]), count=count)
    )
