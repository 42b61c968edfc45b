"""Memory of sharded training: the table of the design, what divides and what does not."""

from dataclasses import replace

import pytest

from legato.capacity.memory import demand_of
from legato.capacity.planning import plan_setup
from legato.training.memory.model import Demand
from legato.training.memory.sharding import KEPT, Sharding
from tests.capacity.setups import model, setup

NAMES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b")


def demand(name: str, **changes: object) -> Demand:
    """A demand in bfloat16 whose gradients are float32 from the start."""
    shape = replace(model(name).shape, sparse_layers=0) if "a3b" in name else model(name).shape
    plain = Demand(shape=shape, size=2, tokens_per_pack=1, parameters=model(name).parameters, fused=True)
    return replace(plain, **changes)  # type: ignore[arg-type]


def gigabytes(name: str, sharding: Sharding, *, gradients: bool = True) -> float:
    memory = demand(name, sharding=sharding).memory(checkpointing=False)
    held = memory.weights + memory.masters + memory.moments + memory.resident
    return (held + (memory.gradients if gradients else 0)) / 1e9


def rounded(values: list[float]) -> list[float]:
    return [round(value, 1) if value < 9.95 else round(value) for value in values]


def test_the_table_of_the_design_on_8_gpus() -> None:
    """GB per GPU: weights, float32 gradients, masters, moments."""
    one, state, layers = Sharding(), Sharding(way="optimizer", ranks=8), Sharding(way="layers", ranks=8)
    assert rounded([gigabytes(name, one) for name in NAMES]) == [11, 31, 147, 266, 550]
    assert rounded([gigabytes(name, state) for name in NAMES]) == [4.5, 13, 61, 111, 229]
    assert rounded([gigabytes(name, state, gradients=False) for name in NAMES]) == [2.1, 6.0, 29, 52, 107]
    # The design has 18 / N bytes a weight of the layers; here their 16-bit shards are not held, so that it is 16 / N.
    assert rounded([gigabytes(name, layers) for name in NAMES]) == [2.0, 5.2, 23, 38, 64]


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_holds_6_bytes_and_12_divided_by_the_ranks(name: str, ranks: int) -> None:
    count = model(name).parameters
    expected = (6 + 12 / ranks) * count / 1e9
    assert gigabytes(name, Sharding(way="optimizer", ranks=ranks)) == pytest.approx(expected, rel=1e-6)


def test_layers_divides_the_layers_and_keeps_the_rest_as_optimizer_does() -> None:
    name, ranks = "qwen3-8b", 16
    outside = 2 * 151936 * 4096 + 4096
    inside = model(name).parameters - outside
    expected = (16 / ranks * inside + (6 + 12 / ranks) * outside) / 1e9
    assert gigabytes(name, Sharding(way="layers", ranks=ranks)) == pytest.approx(expected, rel=1e-6)
    resident = gigabytes(name, Sharding(way="layers", ranks=ranks, resident=True))
    assert resident - gigabytes(name, Sharding(way="layers", ranks=ranks)) == pytest.approx(2 * inside / 1e9)


def test_whole_layers_are_held_while_they_are_gathered() -> None:
    layer = model("qwen3-8b").shape.layer_parameters(sparse=False)
    sharded = demand("qwen3-8b", sharding=Sharding(way="layers", ranks=8))
    # Two layers in 16 bits, a float32 gradient and its copy.
    assert sharded.memory(checkpointing=False).gathered == layer * (2 * 2 + 2 * 4)
    adapted = replace(sharded, adapter_rank=16, trained=None).memory(checkpointing=False)
    assert layer * 4 < adapted.gathered < layer * 4.5
    assert demand("qwen3-8b", sharding=Sharding(way="optimizer", ranks=8)).memory(checkpointing=False).gathered == 0


def test_whole_layers_and_their_gradients_are_counted_where_they_are_kept() -> None:
    qwen, ranks = model("qwen3-8b"), 8
    outside = 2 * 151936 * 4096 + 4096
    inside, layer = qwen.parameters - outside, qwen.shape.layer_parameters(sparse=False)
    nothing, weights, gradients = (
        demand("qwen3-8b", sharding=Sharding(way="layers", ranks=ranks, kept=kept)).memory(checkpointing=False)
        for kept in KEPT
    )
    # Of the gradients one layer and its copy are whole, or all layers.
    assert weights.gathered == 2 * inside + 2 * 4 * layer and weights.gradients == nothing.gradients
    assert gradients.gathered == 2 * inside and gradients.gradients == 4 * qwen.parameters
    assert nothing.weights == weights.weights == gradients.weights
    # Adapters alone have gradients: keeping theirs is keeping the weights.
    adapted = [
        demand("qwen3-8b", adapter_rank=16, sharding=Sharding(way="layers", ranks=ranks, kept=kept))
        for kept in ("weights", "gradients")
    ]
    assert adapted[0].memory(checkpointing=False).gradients == adapted[1].memory(checkpointing=False).gradients


def test_a_plan_keeps_what_a_run_would_and_says_so() -> None:
    option = "training.shard=layers"
    small, large = plan_setup(setup("qwen3-1.7b", 8, option)), plan_setup(setup("qwen3-8b", 8, option))
    assert small.need.kept == "gradients" and large.need.kept == "weights"
    assert large.need.memory.gathered > 2 * 6_900_000_000 and large.fits
    assert any("training.keep_layers = 'weights'" in line for line in large.remarks())
    least = plan_setup(setup("qwen3-8b", 8, option, "training.keep_layers=nothing"))
    assert least.need.kept == "nothing" and least.need.memory.total < large.need.memory.total
    forced = plan_setup(setup("qwen3-8b", 8, option, "training.keep_layers=gradients"))
    assert forced.need.kept == "gradients" and not forced.times.traffic.overlapping
    assert plan_setup(setup("qwen3-8b", 8)).need.kept == "nothing", "weights that are whole need no keeping"


def test_an_offloaded_optimizer_is_divided_too() -> None:
    away = demand("qwen3-8b", offload=True, sharding=Sharding(way="optimizer", ranks=8)).memory(checkpointing=False)
    # Masters and moments of an eighth, and gradients and weights of 2^28 at a time, rounded up from 1.5 GiB.
    qwen = model("qwen3-8b")
    assert away.host == pytest.approx(12 * qwen.parameters / 8 + 2**31, rel=1e-6)
    assert (away.masters, away.moments) == (0, 0)
    # On one rank the embedding has more than 2^28: 3.7 GB of gradients and weights.
    alone = demand("qwen3-8b", offload=True).memory(checkpointing=False)
    assert 2**31 < (4 + 2) * 151936 * 4096 < 2**32
    assert alone.host == pytest.approx(12 * qwen.parameters + 2**32, rel=1e-6)


@pytest.mark.parametrize("way", ["optimizer", "layers"])
def test_more_ranks_never_need_more_memory(way: str) -> None:
    sizes = [
        demand("qwen3-30b-a3b", sharding=Sharding(way=way, ranks=ranks)).memory(checkpointing=True).total
        for ranks in (1, 2, 3, 8, 64, 512)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_one_pack_holds_the_gradients_that_the_freed_activations_leave_room_for() -> None:
    whole = replace(demand_of(setup(), 0), several_packs=True, tokens_per_pack=20_000)
    several, one = (replace(whole, several_packs=each).memory(checkpointing=False) for each in (True, False))
    assert several.gradients == 4 * model("qwen3-8b").parameters
    assert one.gradients == 4 * 151936 * 4096 and one.total < several.total
    # With few activations the gradients of the layers decide, at the end of the backward.
    few = replace(whole, several_packs=False, tokens_per_pack=64).memory(checkpointing=False)
    assert few.gradients == several.gradients - few.activations


def test_a_way_or_a_number_of_ranks_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of none, optimizer, layers, got 'zero'"):
        Sharding(way="zero")
    with pytest.raises(ValueError, match="at least one rank"):
        Sharding(ranks=0)
    with pytest.raises(ValueError, match="expected one of nothing, weights, gradients, got 'all'"):
        Sharding(kept="all")
