"""Batch V of the specification and its vectors."""

import json
import math
from pathlib import Path
from typing import Any

from tests.reference.batch import Batch, Rows

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "vectors.json").read_text())
VECTORS: dict[str, dict[str, Any]] = GOLDEN["vectors"]
LENGTHS = [len(row) for row in GOLDEN["inputs"]["old"]]
WIDTH = max(LENGTHS)


def batch_v(advantages: str = "A") -> Batch:
    """Four responses of 4, 3, 2 and 5 tokens; positions outside them are NaN. `advantages`: A, A_tok or A_turn."""
    inputs = GOLDEN["inputs"]
    old = inputs["old"]
    return Batch(
        new=pad(add_scaled(old, inputs["delta_new_minus_old"], 1)),
        old=pad(old),
        roll=pad(add_scaled(old, inputs["log_old_minus_rollout"], -1)),
        ref=pad(add_scaled(old, inputs["ref_minus_old"], 1)),
        mask=[[position < length for position in range(WIDTH)] for length in LENGTHS],
        advantages=pad(token_advantages(advantages)),
        group=[0] * len(old),
        turn=[row + [-1] * (WIDTH - len(row)) for row in inputs["turn"]],
        gamma=pad(inputs["gamma"]),
    )


def token_advantages(name: str) -> Rows:
    """The advantage of each token, from advantages per response (A), per turn (A_turn) or per token (A_tok)."""
    inputs = GOLDEN["inputs"]
    if name == "A":
        return [[advantage] * length for advantage, length in zip(inputs["A"], LENGTHS, strict=True)]
    if name == "A_turn":
        return [[by_turn[turn] for turn in turns] for by_turn, turns in zip(inputs["A_turn"], inputs["turn"], strict=True)]
    return inputs[name]


def add_scaled(base: Rows, change: Rows, sign: int) -> Rows:
    """base + sign * change."""
    return [[b + sign * c for b, c in zip(left, right, strict=True)] for left, right in zip(base, change, strict=True)]


def pad(rows: Rows) -> Rows:
    """Fill up to the common width with NaN, so that a read outside the mask shows."""
    return [list(row) + [math.nan] * (WIDTH - len(row)) for row in rows]
