"""Algorithms with the adaptive clip, and the sums of an update without computing its loss."""

import math
from typing import Any

import numpy
import torch

import legato
from legato.core.sums import Deviation, Mean, Piece, Sums

QUOTIENT = math.log1p(4e-4) / -math.log1p(-3e-4)
"""b_high / b_low of the start."""


def auto_clip(name: str = "gspo-auto", **fields: Any) -> legato.Algorithm:
    changes: dict[str, Any] = {} if name == "gspo-auto" else {"objective.trust": ["auto-clip"]}
    return legato.algorithm(name, changes | {f"objective.trust.auto-clip.{key}": value for key, value in fields.items()})


def as_floats(state: Any) -> dict[str, float]:
    return {key: float(value) for key, value in state["auto-clip"].items()}


def sums_of(state: Any, log_s: Any, signs: Any, widening: Any = 1.0) -> Sums:
    """The sums that the loss of such an update would return for the clip; a test compares them. Faster than the loss."""
    log_s, signs, band = numpy.asarray(log_s, float), numpy.asarray(signs), as_floats(state)
    pieces: dict[str, Piece] = {}
    for word, among, bound in (("positive", signs > 0, band["log_high"]), ("negative", signs < 0, -band["log_low"])):
        reach = (log_s / (bound * widening))[among]
        sizes = ((reach > 1).sum(), reach.sum(), (reach**2).sum(), among.sum())
        beyond, total, squares, count = (torch.tensor(float(size), dtype=torch.float64) for size in sizes)
        pieces |= {f"clip/beyond_{word}": Mean(beyond, count), f"clip/reach_{word}": Deviation(total, squares, count)}
    return Sums(pieces)
