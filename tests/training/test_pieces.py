"""Weights divided among ranks: errors inside an exchange, and pieces that lie apart from the weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from legato.training.pieces import Divided, Piece


class Ranks:
    """Rank 0 of `size` ranks; the others do nothing, and exchanges run out of memory if they should."""

    rank = 0

    def __init__(self, size: int, *, fails: bool = False) -> None:
        self.size, self.fails = size, fails

    def meet(self, operation: str) -> None:
        pass

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
