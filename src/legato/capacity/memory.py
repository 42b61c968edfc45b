"""Memory per GPU of a setup, by the formulas of `training/memory/model.py`."""

from dataclasses import dataclass, replace
from typing import Any

from legato.capacity.setup import Setup
from legato.training.memory.fit import cache_budget, most_kept
from legato.training.memory.model import Demand, Memory
from legato.training.memory.sharding import KEPT, Sharding

LOGITS_AT_ONCE = 5 * 2**27
"""Logits that exist together on a GPU: `Policy.tokens_at_once` there, by tests/capacity/test_memory.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The memory a setup needs on each GPU, at the longest lengths that the configuration allows."""

    memory: Memory
    available: int
    slots: int
    """Rows that the engine decodes together."""
    wanted_slots: int
    """Rows that it would decode together if keys and values had more room."""
    kept: str = KEPT[0]
    """With divided layers: what is held whole during updates."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.available and (self.slots > 0 or not self.wanted_slots)

    @property
    def checkpointing(self) -> bool:
        return self.memory.checkpointing


def need_of(setup: Setup) -> Need:
    """The memory of a setup. Where checkpointing is not decided, it is on if activations do not fit without it.

    Then divided layers are kept whole as far as there is memory.
    """
    wanted, slots = decoded_rows(setup)
    chosen = KEPT[0] if setup.keep_layers == "auto" else setup.keep_layers

    def need(checkpointing: bool, kept: str) -> Need:
        memory = demand_of(setup, slots, kept).memory(checkpointing=checkpointing)
        return Need(memory=memory, available=setup.hardware.memory, slots=slots, wanted_slots=wanted, kept=kept)

    choices = (False, True) if setup.checkpointing is None else (setup.checkpointing,)
    needs = [need(checkpointing, chosen) for checkpointing in choices]
    first = next((each for each in needs if each.fits), needs[-1])
    if setup.shard != "layers" or setup.keep_layers != "auto" or not first.fits:
        return first
    # As a run decides it (`run/memory.py`): with the gradients of several packs.
    largest = replace(demand_of(setup, slots), several_packs=True)
    return need(first.checkpointing, most_kept(largest, setup.hardware.memory, checkpointing=first.checkpointing))


def decoded_rows(setup: Setup) -> tuple[int, int]:
    """(rows to decode together, how many of them fit): the engine takes a share of what training leaves free."""
    if setup.servers:
        return 0, 0
    rows = max(setup.groups * setup.samples, -(-setup.evaluated // setup.gpus))
    wanted = min(setup.rows_at_once, rows)
    budget = cache_budget(demand_of(setup, 0), setup.hardware.memory, setup.kv_memory_share)
    per_token = 2 * setup.model.shape.layers * setup.model.shape.key * setup.size
    room = budget // per_token - setup.response_tokens
    return wanted, max(0, min(wanted, room // cached_tokens_per_row(setup)))


def cached_tokens_per_row(setup: Setup) -> int:
    """Tokens of the KV cache for each row: a response, and a prompt in steps of 64, since an evaluation shares none."""
    return -(-setup.prompt_tokens // 64) * 64 + setup.response_tokens


def demand_of(setup: Setup, slots: int, kept: str = KEPT[0]) -> Demand:
    """The memory demand of a setup whose engine decodes `slots` rows together; 0: it has no KV cache.

    `kept`: what is held whole of divided layers.
    """
    model = setup.model
    share = setup.share_of_update(setup.prompt_tokens, setup.response_tokens)
    group = setup.prompt_tokens + share.rows * setup.response_tokens
    update = share.pieces * setup.prompt_tokens + share.responses * setup.response_tokens
    tokens = min(max(setup.tokens_per_pack, setup.longest), update)
    half, at_once = setup.size == 2, max(1, LOGITS_AT_ONCE // model.shape.vocabulary)
    trained = setup.trained
    if setup.value_head and not setup.lora_rank:
        trained = (model.parameters if trained is None else trained) + model.shape.hidden + 1
    return Demand(
        shape=model.shape,
        size=setup.size,
        tokens_per_pack=tokens,
        parameters=model.parameters * (1 + setup.copies),
        trained=trained if trained is not None or setup.lora_rank else model.parameters,
        adapter_rank=setup.lora_rank,
        eight_bit=setup.eight_bit,
        offload=setup.offload,
        reference=setup.reference,
        value_head=setup.value_head,
        head_tokens=min(tokens, at_once if half else max(at_once, setup.response_tokens)),
        logit_bytes=2 if half else 0,
        cached_tokens=slots * cached_tokens_per_row(setup) + setup.response_tokens if slots else 0,
        tables=not half or model.scores,
        scores=model.scores,
        fused=setup.fused,
        by_parts=setup.by_parts,
        sharing=(setup.prompt_tokens + share.rows * setup.longest) / group,
        longest=setup.longest,
        several_packs=update > tokens,
        step_cells=setup.prompts * setup.samples * setup.response_tokens,
        sharding=Sharding(way=setup.shard, ranks=setup.gpus, resident=not setup.servers, kept=kept),
        **_routes(setup),
    )


def _routes(setup: Setup) -> dict[str, Any]:
    """The demand of recorded routes for a mixture, with every response at its limit.

    A rank has the trainer's routes of its own rows, and the engine's and those that are replayed of all rows of a step. A
    server reports no routes.
    """
    if not setup.model.is_mixture:
        return {}
    responses = setup.samples * setup.response_tokens
    share = setup.share_of_update(setup.prompt_tokens, setup.response_tokens)
    return {
        "routed": (setup.prompts if setup.all_routes else setup.groups) * responses,
        "routed_per_update": share.responses * setup.response_tokens,
        "engine_routed": setup.prompts * responses if setup.engine_routes and not setup.servers else 0,
        "replayed": setup.prompts * (responses + setup.prompt_tokens) if setup.routing_replay else 0,
    }
