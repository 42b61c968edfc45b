"""The work of a step: FLOPs of passes, bytes that decoding reads, packs of an update.

FLOPs: 2 for each weight of a matrix and token, 4 for each number of a query and key it meets; a backward costs twice its
forward, and once where the weights are frozen.
"""

import math
from dataclasses import dataclass

from legato.training.memory.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """FLOPs of one forward, by part."""

    body: float
    head: float
    attention: float

    @property
    def forward(self) -> float:
        return self.body + self.head + self.attention

    def training(self, *, frozen: bool, recomputed: bool) -> float:
        """FLOPs of forward and backward; `frozen`: weights need no gradient; `recomputed`: layers are computed again."""
        products = (2 if frozen else 3) * (self.body + self.head)
        return products + 3 * self.attention + (self.body + self.attention if recomputed else 0.0)


def active_in_layers(shape: Shape) -> int:
    """Matrix weights of all layers that one token meets."""
    attention = 2 * shape.hidden * (shape.query + shape.key)
    dense = 3 * shape.hidden * shape.intermediate
    experts = 3 * (shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate) + shape.experts
    sparse = shape.sparse_layers * shape.hidden * experts
    return shape.layers * attention + (shape.layers - shape.sparse_layers) * dense + sparse


def head_weights(shape: Shape) -> int:
    return shape.hidden * shape.vocabulary


def pass_over_groups(shape: Shape, groups: float, prompt: int, samples: int, response: int, pieces: int = 1) -> Pass:
    """The forward over some groups, each in so many pieces; the prompt is computed once for each piece."""
    pairs = pieces * prompt * (prompt + 1) / 2 + samples * (response * prompt + response * (response + 1) / 2)
    return Pass(
        body=2.0 * active_in_layers(shape) * groups * (pieces * prompt + samples * response),
        head=2.0 * head_weights(shape) * groups * samples * response,
        attention=4.0 * shape.query * shape.layers * groups * pairs,
    )


def packs_of(groups: int, prompt: int, samples: int, response: int, tokens_per_pack: int) -> int:
    """How many packs some equal groups fill. A group is split only if it is larger than a pack."""
    group = prompt + samples * response
    if group <= tokens_per_pack:
        return -(-groups // (tokens_per_pack // group))
    return groups * pieces_of(prompt, samples, response, tokens_per_pack)


def pieces_of(prompt: int, samples: int, response: int, tokens_per_pack: int) -> int:
    """Into how many pieces a group is split, so that each fits into a pack."""
    rows = max(1, (tokens_per_pack - prompt) // response)
    return -(-samples // rows)


def read_weights(shape: Shape, rows: int) -> float:
    """Matrix weights that one decode step of some rows reads: of the experts, those that a row is expected to choose."""
    if not shape.sparse_layers:
        return active_in_layers(shape) + head_weights(shape)
    missed = (1 - shape.experts_per_token / shape.experts) ** rows
    used = shape.experts * (1 - missed)
    more = 3 * shape.hidden * shape.expert_intermediate * (used - shape.experts_per_token) * shape.sparse_layers
    return active_in_layers(shape) + head_weights(shape) + max(0.0, more)


def cache_bytes_per_token(shape: Shape, size: int) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return 2 * shape.layers * shape.key * size


def decode_floor(
    shape: Shape,
    size: int,
    *,
    rows: int,
    samples: int,
    prompt: int,
    response: int,
    matmul: float,
    bandwidth: float,
) -> float:
    """Roofline seconds of decoding `response` tokens in `rows` rows that share prompts by `samples`.

    Each step takes the slower of reading the weights and computing the products, plus reading keys and values: those of a
    shared prompt once.
    """
    weights = read_weights(shape, rows) * size / bandwidth
    products = 2.0 * (active_in_layers(shape) + head_weights(shape)) * rows / matmul
    keys = math.ceil(rows / samples) * prompt + rows * (response - 1) / 2
    return response * (max(weights, products) + keys * cache_bytes_per_token(shape, size) / bandwidth)
