"""A look at the slots that nobody waits for: their state is copied while the next steps are already under way."""

import torch
from torch import Tensor

from legato.rollouts.gpu.landing import Row
from legato.rollouts.gpu.slots import Store


class Look:
    """What the slots were at after some steps, on its way to the host. It can be asked again once it has been taken."""

    def __init__(self, store: Store, *, texts: bool) -> None:
        self.store = store
        self.done = self._pinned(store.done)
        self.texts: tuple[Tensor, Tensor] | None = None
        """(tokens, how many are written), where stop strings are looked for"""
        if texts:
            self.texts = self._pinned(store.tokens), self._pinned(store.written)
        self.event = torch.cuda.Event() if store.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.rows: dict[int, Row] = {}
        """slot -> the response that had it; a slot may have gone to another one since"""

    def _pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=self.store.device.type == "cuda")

    def ask(self, rows: dict[int, Row]) -> "Look":
        """Copy the state behind everything enqueued so far."""
        self.rows = rows
        self.done.copy_(self.store.done, non_blocking=True)
        if self.texts is not None:
            self.texts[0].copy_(self.store.tokens, non_blocking=True)
            self.texts[1].copy_(self.store.written, non_blocking=True)
        if self.event is not None:
            self.event.record()
        return self

    def taken(self) -> "Look":
        """Wait until the copy is there."""
        if self.event is not None:
            self.event.synchronize()
        return self
