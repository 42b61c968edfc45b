"""Weights divided among ranks: errors inside an exchange, and pieces that lie apart from the weights."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from legato.core.world import others_waiting
from legato.training.optimizer import Optimizer, OptimizerSettings
from legato.training.pieces import Divided, Piece, Whole, run_of


class Ranks:
    """Rank 0 of `size` ranks; the others do nothing, and exchanges run out of memory if they should."""

    rank = 0

    def __init__(self, size: int, *, fails: bool = False) -> None:
        self.size, self.fails = size, fails

    def meet(self, operation: str) -> None:
        pass

    def exchanging(self, operation: str) -> AbstractContextManager[None]:
        return others_waiting()

    def begin_exchange(self, operation: str) -> None:
        pass

    def end_exchange(self) -> None:
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


class SummedRanks(Ranks):
    """A rank whose tables are added to those that the others have sent before."""

    def __init__(self, rank: int, size: int, tables: list[Tensor]) -> None:
        super().__init__(size)
        self.rank, self.tables = rank, tables

    def sum_table(self, table: Tensor) -> Tensor:
        self.tables.append(table)
        return torch.stack(self.tables[-self.size :]).sum(0)


def norm_on_ranks(gradients: list[Tensor], size: int) -> Tensor:
    """The norm of which each rank has pieces: that of the last rank, in whose turn all have told theirs."""
    tables: list[Tensor] = []
    for rank in range(size):
        weights = {str(number): nn.Parameter(torch.zeros_like(each)) for number, each in enumerate(gradients)}
        division = Divided(weights, SummedRanks(rank, size, tables))
        own = {}
        for number, each in enumerate(gradients):
            rows = run_of(len(each), rank, size)
            if rows:  # the optimizer has no master for a piece that holds nothing
                own[str(number)] = each[rows.start : rows.stop].reshape(-1)
        norm = division.norm(own)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_process_and_ranks_have_the_same_norm(dtype: torch.dtype) -> None:
    """One rank to the bit, in any order of magnitude; several up to how float sums of pieces and of wholes differ."""
    generator, several = torch.Generator().manual_seed(1), 5e-7 if dtype == torch.float32 else 1e-15
    for number in range(20):
        shapes = [(97, 33), (1000, 7), (33,), (5, 4, 3), (1,), *[(64, 65)] * (8 * number)]
        sizes = (10.0 ** torch.randint(-8, 8, (len(shapes),), generator=generator)).tolist()
        gradients = [
            size * torch.randn(shape, generator=generator, dtype=dtype) for size, shape in zip(sizes, shapes, strict=True)
        ]
        weights = {str(place): nn.Parameter(torch.zeros_like(each)) for place, each in enumerate(gradients)}
        one = Whole(weights).norm({str(place): each for place, each in enumerate(gradients)})
        assert torch.equal(one, torch.nn.utils.get_total_norm(gradients)) and one.dtype == dtype
        assert torch.equal(norm_on_ranks(gradients, 1), one)
        for size in (2, 3):
            assert float(norm_on_ranks(gradients, size)) == pytest.approx(float(one), rel=several)


@pytest.mark.parametrize("rows_of_rank_1", [1, 0])
def test_two_ranks_combine_norms_of_weights_as_one_process_does(rows_of_rank_1: int) -> None:
    """Weights of one row lie on rank 0 as a whole: nothing but the way of combining their norms could differ."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        gradients = [torch.randn(1, 200, generator=generator) * 10.0 ** (number % 5) for number in range(60)]
        gradients += [torch.zeros(2, 3)] * rows_of_rank_1
        assert torch.equal(norm_on_ranks(gradients, 2), norm_on_ranks(gradients, 1))


def test_the_norm_of_ranks_is_not_finite_where_one_piece_is_not() -> None:
    gradients = [torch.ones(4, 2), torch.tensor([1.0, float("nan")])]
    assert norm_on_ranks(gradients, 2).isnan() and not norm_on_ranks([torch.ones(4, 2)], 2).isnan()


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
