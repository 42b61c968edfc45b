"""The estimated bytes of routes against those that a step and a pass hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from legato.core.world import OneProcess
from legato.policy.experts.routing import Directions
from legato.policy.model.load import Loading, load_policy
from legato.training.anchor import anchor
from legato.training.memory.model import Demand
from legato.training.memory.shape import Shape
from legato.training.plan import Update
from legato.training.tables import Tables
from tests.policy.exact import Words, accumulate, ones, ragged
from tests.policy.routes import as_published
from tests.training.held import peak_bytes
from tests.training.routed import CPU, exact_policy, gspo, routes_of, tables_of
from tests.training.steps import batch_by_hand, one_update


@pytest.mark.parametrize("replay", ["off", "R2", "R3"])
def test_route_tables_need_the_estimated_bytes(replay: str) -> None:
    policy, batch = exact_policy(), batch_by_hand()
    batch = replace(batch, routes=routes_of(policy, batch))
    tables = tables_of(policy, gspo(), batch, [one_update(batch)], replay=replay)
    assert tables.old_experts is not None and tables.old_router_logprobs is not None
    tensors: list[Any] = [tables.old_experts.values, tables.old_router_logprobs.values, tables.sampler_experts]
    if tables.replay is not None:
        tensors += [tables.replay.experts, tables.replay.tokens]
    written = batch.texts.tokens.numel()
    demand = Demand(
        shape=Shape.from_config(policy.body.config),
        size=8,
        tokens_per_pack=0,
        routed=written,
        engine_routed=written,
        replayed=0 if replay == "off" else written + batch.texts.prompts.numel(),
    )
    assert demand.memory(checkpointing=False).routes == sum(table.nbytes for table in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recording_routes_needs_no_more_bytes_than_estimated(dtype: torch.dtype) -> None:
    model = as_published("qwen3-moe", dtype, num_experts=64, num_experts_per_tok=4, num_hidden_layers=4)
    policy = load_policy(model, Loading(device="cpu"), tokenizer=Words())
    texts, rows = ragged(groups=8, each=6, longest=60), torch.arange(48)
    packed = policy.pack(texts, rows)
    plain, looked_at = (
        peak_bytes(lambda directions=directions: accumulate(policy, texts, rows, ones, directions))
        for directions in (None, Directions())
    )
    read = len(packed.read)
    demand = Demand(
        shape=Shape.from_config(policy.body.config),
        size=dtype.itemsize,
        tokens_per_pack=len(packed.tokens),
        routed_per_update=read,
    )
    estimated = demand._routes()
    assert 0.3 * estimated < looked_at - plain <= estimated
    without = demand.memory(checkpointing=False)
    assert without.routes == 0


def test_a_rank_holds_the_routes_of_the_rows_that_it_trains_on_alone() -> None:
    """And of all rows where a later epoch deals them anew. Reading a row that is not held fails."""

    class First(OneProcess):
        size = 2

    policy, batch = exact_policy(), batch_by_hand()
    rows = torch.arange(len(batch))
    own, others = rows[::2], rows[1::2]
    update = Update(index=0, epoch=0, micro_batches=(own, others), owners=(0, 1))
    later = Update(index=0, epoch=1, micro_batches=(own, others), owners=(1, 0))
    tables = Tables.from_batch(batch, CPU).with_routes(policy.routers, "off")
    options: dict[str, Any] = {"choice": "recompute", "skip_first": False, "world": First()}
    held = anchor(tables, policy, None, [update], **options).old_experts
    assert held is not None and len(held.values) == len(own)
    alone = tables_of(policy, gspo(), batch, [replace(update, owners=())]).old_experts
    assert alone is not None and torch.equal(held.part(own, 2), alone.part(own, 2))
    with pytest.raises(IndexError):
        held.part(others[:1], 2)
    whole = anchor(tables, policy, None, [update, later], **options).old_experts
    assert whole is not None and len(whole.values) == len(rows)
