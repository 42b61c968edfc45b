"""Asynchronous copies of the slots' state to the host, made while the next steps already run."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.rollouts.engine import Handle
from legato.rollouts.gpu.landing import Row, to_host
from legato.rollouts.gpu.slots import KVStore


@dataclass(frozen=True, slots=True)
class LatestTokens:
    """The last tokens of every slot, on their way to the host. A slot's newest token is in the last column."""

    counts: Tensor
    """[slots]: how many tokens of the response have been sampled."""
    tokens: Tensor
    """[slots, width]"""
    logprobs: Tensor
    """[slots, width]"""

    @classmethod
    def copy(cls, store: KVStore, width: int) -> "LatestTokens":
        width = min(width, store.room.response_tokens)
        columns = store.sampled_count[:, None] - width + torch.arange(width, device=store.device)
        columns = columns.clamp(min=0)
        return cls(
            to_host(store.sampled_count.clone()),
            to_host(store.tokens.gather(1, columns)),
            to_host(store.logprobs.gather(1, columns)),
        )


class SlotCopy:
    """The state of the slots after some steps, on its way to the host. Reusable once it has been waited for."""

    def __init__(self, store: KVStore, *, texts: bool) -> None:
        self.store = store
        self.done = self._pinned_like(store.done)
        self.texts: tuple[Tensor, Tensor] | None = None
        """(tokens, response lengths); None without stop strings"""
        if texts:
            self.texts = self._pinned_like(store.tokens), self._pinned_like(store.sampled_count)
        self.event = torch.cuda.Event() if store.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.rows: dict[int, Row] = {}
        """slot -> its response at the time of the copy; the slot may have been reassigned since"""
        self.latest: LatestTokens | None = None
        """The last tokens of every slot, if they are wanted."""
        self.watched: frozenset[Handle] = frozenset()
        """The jobs whose last tokens are wanted."""

    def _pinned_like(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=self.store.device.type == "cuda")

    def start(self, rows: dict[int, Row], watched: Collection[Handle] = (), latest: int = 0) -> "SlotCopy":
        """Enqueue the copy after everything enqueued so far, with the `latest` last tokens if a row's job is `watched`."""
        self.rows = rows
        self.watched = frozenset(watched).intersection(row.job.handle for row in rows.values())
        self.latest = LatestTokens.copy(self.store, latest) if self.watched else None
        self.done.copy_(self.store.done, non_blocking=True)
        if self.texts is not None:
            self.texts[0].copy_(self.store.tokens, non_blocking=True)
            self.texts[1].copy_(self.store.sampled_count, non_blocking=True)
        if self.event is not None:
            self.event.record()
        return self

    def wait(self) -> "SlotCopy":
        """Wait until the copy has arrived."""
        if self.event is not None:
            self.event.synchronize()
        return self
