"""The worked examples of the literature as tensors: one response with two outliers, and a group of four."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Responses [B, T] under the old and the new policy."""

    title: str
    old: Tensor
    new: Tensor
    mask: Tensor
    advantages: Tensor
    words: tuple[tuple[str, ...], ...]
    """The tokens as text, row by row."""

    @property
    def log_ratios(self) -> Tensor:
        return torch.where(self.mask, self.new - self.old, 0.0)


OUTLIERS = (1.9, 0.4)


def outliers(length: int = 512) -> Rows:
    """A response in which two tokens moved and all others did not; once with A = +1, once with A = -1."""
    shift = torch.zeros(2, length, dtype=torch.float64)
    places = (length // 3, 2 * length // 3)
    for place, ratio in zip(places, OUTLIERS, strict=True):
        shift[:, place] = math.log(ratio)
    old = torch.full_like(shift, -1.0)
    words = tuple(f"w={OUTLIERS[places.index(place)]:g}" if place in places else "·" for place in range(length))
    return Rows(
        title=f"Two outliers among {length} tokens",
        old=old,
        new=old + shift,
        mask=torch.ones_like(shift, dtype=torch.bool),
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        words=(words, words),
    )


_OLD = ([-1.2, -0.5, -2.0, -0.1], [-0.7, -1.5, -0.3], [-0.9, -0.4], [-2.5, -0.2, -1.1, -0.6, -0.8])
_SHIFT = ([0.30, -0.10, 0.05, -0.249], [-0.45, 0.10, 0.02], [0.05, 0.15], [1.20, -0.05, 0.02, 0.03, -0.01])
REWARDS = (1.0, 0.0, 1.0, 0.0)


def group() -> Rows:
    """Four responses to one prompt with rewards 1, 0, 1, 0, each at another position relative to the band."""
    old = [torch.tensor(row, dtype=torch.float64) for row in _OLD]
    new = [row + torch.tensor(shift, dtype=torch.float64) for row, shift in zip(old, _SHIFT, strict=True)]
    lengths = torch.tensor([len(row) for row in _OLD])
    return Rows(
        title="A group of four responses",
        old=pad_sequence(old, batch_first=True),
        new=pad_sequence(new, batch_first=True),
        mask=torch.arange(int(lengths.max())) < lengths.unsqueeze(1),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64),
        words=tuple(tuple(f"token {place + 1}" for place in range(len(row))) for row in _OLD),
    )
