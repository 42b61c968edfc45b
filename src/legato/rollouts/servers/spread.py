"""Which server gets a request: the one that has its prefix, where load allows; else the least loaded.

A group's prompt, and the later turns of an episode, go to the server that read the beginning already: its prefix cache has
the keys. A server that is idle takes over what waits for a busy one.
"""

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor

REMEMBERED = 4096
"""Prompts whose server is remembered."""
SLACK, LEEWAY = 1.25, 4
"""How much busier than the least loaded server the one with the prefix may be: this factor, and so many requests."""


class Spread:
    """Remembers which server has read which prompt."""

    def __init__(self) -> None:
        self._servers: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._lengths: dict[int, int] = {}
        """length of a prompt -> how many of that length are remembered"""

    def choose(self, prompt: Tensor, loads: Mapping[int, int]) -> int:
        """The server for a prompt, of those with a load; remembers it."""
        idlest = min(loads, key=lambda server: (loads[server], server))
        home = self._find(prompt)
        server = idlest
        if home is not None and home in loads and loads[home] <= SLACK * loads[idlest] + LEEWAY:
            server = home
        self._remember(prompt, server)
        return server

    def forget(self, server: int) -> None:
        """A server is gone, and its cache with it."""
        for key in [key for key, each in self._servers.items() if each == server]:
            self._drop(key)

    def _find(self, prompt: Tensor) -> int | None:
        """The server that has the longest beginning of a prompt."""
        data = _bytes(prompt)
        for length in sorted(self._lengths, reverse=True):
            if length <= len(prompt):
                server = self._servers.get((length, data[: 8 * length]))
                if server is not None:
                    return server
        return None

    def _remember(self, prompt: Tensor, server: int) -> None:
        key = (len(prompt), _bytes(prompt))
        if key not in self._servers:
            self._lengths[key[0]] = self._lengths.get(key[0], 0) + 1
        self._servers[key] = server
        self._servers.move_to_end(key)
        if len(self._servers) > REMEMBERED:
            self._drop(next(iter(self._servers)))

    def _drop(self, key: tuple[int, bytes]) -> None:
        del self._servers[key]
        self._lengths[key[0]] -= 1
        if not self._lengths[key[0]]:
            del self._lengths[key[0]]


def _bytes(prompt: Tensor) -> bytes:
    data: bytes = prompt.numpy().astype("<i8").tobytes()
    return data
