"""KV caches of finished responses, kept for the next turn of the same episode.

The response that ends a turn carries its KV cache (`Response.kept`), and the request for the next turn hands it back
(`Request.kept`), so a cache lives exactly as long as its episode needs it. The number of bytes is limited: texts beyond the
limit are not kept, and their next turn is computed from the beginning.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_BYTES = 2**30
"""Bytes of all KV caches that an engine keeps between turns. It does not depend on the free memory of the moment: what is
computed again may round differently, and a run must be repeatable."""

Tables = dict[int, tuple[Tensor, Tensor]]
"""layer -> keys and values, [rows, K, tokens, D]"""


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Keys and values of rows that left a decoder together."""

    tables: Tables

    @property
    def bytes(self) -> int:
        return sum(table.nbytes for pair in self.tables.values() for table in pair)


@dataclass(frozen=True, slots=True, eq=False)
class KeptText:
    """The KV cache of one text."""

    rows: KeptRows
    row: int
    tokens: Tensor
    """[T]: the tokens whose keys and values are in the first T columns."""
    keeper: "Keeper"
    weights: int
    """`Keeper.weights` when the keys and values were computed."""


class Keeper:
    """Decides which KV caches an engine keeps, and which may still be used."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.weights = 0
        """Counts changes of the weights."""
        self.reused_tokens = 0
        """Prompt tokens that were not computed again, so far."""
        self._alive: weakref.WeakSet[KeptRows] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes of the KV caches that some episode still holds."""
        return sum(rows.bytes for rows in self._alive)

    def forget(self) -> None:
        """Stop using all KV caches so far: the weights change."""
        self.weights += 1

    @property
    def room(self) -> int:
        """How many more bytes may be kept."""
        return max(0, self.most_bytes - self.bytes)

    def keep(self, tables: Tables, texts: Sequence[Tensor]) -> list[KeptText]:
        """The KV caches of texts, one for each row of the tables."""
        rows = KeptRows(tables)
        self._alive.add(rows)
        return [KeptText(rows, number, text, self, self.weights) for number, text in enumerate(texts)]

    def usable(self, kept: object, prompt: Tensor) -> tuple[KeptText, int] | None:
        """A KV cache and how many of the prompt's tokens it covers; None if it is of no use.

        The last token of a prompt is never covered: its logits are needed.
        """
        if not isinstance(kept, KeptText) or kept.keeper is not self or kept.weights != self.weights:
            return None
        most = min(len(kept.tokens), len(prompt) - 1)
        equal = kept.tokens[:most] == prompt[:most]
        common = most if bool(equal.all()) else int(equal.to(torch.int8).argmin())
        return (kept, common) if common else None
