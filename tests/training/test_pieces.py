"""Weights divided among ranks: errors inside an exchange, and pieces that lie apart from the weights."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from legato.core.world import others_waiting
from legato.training.optimizer import Optimizer, OptimizerSettings
from legato.training.pieces import Divided, Piece


class Ranks:
    """Rank 0 of `size` ranks; the others do nothing, and exchanges run out of memory if they should."""

    rank = 0

    def __init__(self, size: int, *, fails: bool = False) -> None:
        self.size, self.fails = size, fails

    def meet(self, operation: str) -> None:
        pass

    def exchanging(self, operation: str) -> AbstractContextManager[None]:
        return others_waiting()

    def sum_table(self, table: Tensor) -> Tensor:
        return table

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return flat[: len(flat) // self.size]

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        whole.zero_()[: len(part)] = part


def weight(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.ones(shape)
    return parameter


@pytest.mark.parametrize("exchange", ["gradients", "publish"])
def test_an_error_inside_an_exchange_says_that_the_others_wait(exchange: str) -> None:
    divided: Any = Divided({"a": weight(4, 2)}, Ranks(2, fails=True))
    with pytest.raises(torch.OutOfMemoryError) as failed:
        getattr(divided, exchange)()
    assert failed.value.others_wait  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [1, 2])
def test_pieces_that_lie_apart_are_written_into_the_weights(size: int) -> None:
    own = torch.arange(8.0 if size == 1 else 4.0)
    whole = nn.Parameter(torch.full((4, 2), 9.0, dtype=torch.bfloat16))
    divided = Divided({"a": whole}, Ranks(size), {"a": Piece(0, len(own), 8, own, True, is_master=True)})
    divided.publish()
    assert whole.flatten()[: len(own)].tolist() == own.tolist()
    Divided({}, Ranks(size), {}).publish()  # adapters alone are trained: no layer is


def test_a_process_group_of_one_rank_changes_no_bit() -> None:
    """The clip of the gradient is read from its norm: a norm with another last digit would train other weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(97, 33), (1000, 7), (33,), (5, 4, 3), (1,), *[(64, 65)] * 20]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [
        [10.0 ** (number % 7 - 3) * torch.randn(shape, generator=generator) for shape in shapes] for number in range(8)
    ]

    def train(*, divided: bool) -> tuple[list[float], list[Tensor]]:
        weights = {str(number): nn.Parameter(value.clone()) for number, value in enumerate(start)}
        division = Divided(weights, Ranks(1)) if divided else None
        optimizer, norms = Optimizer(weights, OptimizerSettings(lr=1e-2), total_updates=8, division=division), []
        for own in gradients:
            for parameter, gradient in zip(weights.values(), own, strict=True):
                parameter.grad = gradient.clone()
            norms.append(float(optimizer.step()[0]))
        return norms, [parameter.detach() for parameter in weights.values()]

    (norms, weights), (expected_norms, expected) = train(divided=True), train(divided=False)
    assert norms == expected_norms
    assert all(torch.equal(own, other) for own, other in zip(weights, expected, strict=True))
