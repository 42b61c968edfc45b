"""Estimates the memory of a run, and decides `policy.gradient_checkpointing = "auto"` from it."""

from typing import Any

from legato.config.resolved import Resolved
from legato.core.world import OneProcess, World
from legato.errors import InputError
from legato.policy.model.load import recompute_layers
from legato.policy.policy import Policy
from legato.rollouts.registry import is_remote
from legato.run import wire
from legato.training.anchor import holds_all_routes
from legato.training.memory.available import available
from legato.training.memory.fit import Fit, fit, limit_cache, most_kept, refuse_if_too_large
from legato.training.memory.model import Demand, gigabytes
from legato.training.memory.shape import Shape
from legato.training.memory.sharding import KEPT, Sharding, describe_kept
from legato.training.ranks.join import read_launch


def demand_of(resolved: Resolved, policy: Policy, ranks: int = 1) -> Demand:
    """The memory demand of a loaded policy and its updates, at the largest sizes the configuration allows.

    With several ranks: that of one of them.
    """
    config, device = resolved.config, policy.device.type
    training, rollouts = config.training, config.rollouts
    prompt, response, each = config.policy.max_prompt_tokens, rollouts.max_response_tokens, rollouts.samples_per_prompt
    group = prompt + each * response
    update_tokens = -(-training.prompts_per_step // (training.updates_per_step * ranks)) * group
    tokens = min(max(training.tokens_per_pack, prompt + response), update_tokens)
    size = policy.model.get_input_embeddings().weight.element_size()
    body_config = policy.body.config.get_text_config()
    scores = bool(getattr(body_config, "attn_logit_softcapping", None)) or "gpt_oss" in body_config.model_type
    half, lora = device == "cuda" and size == 2, config.policy.lora
    trained = sum(weight.numel() for weight in policy.parameters().values())
    every = sum(weight.numel() for weight in policy.model.parameters())
    # Each rank samples its share of the groups and of an evaluation.
    rows = max(
        -(-training.prompts_per_step // ranks) * each,
        -(-config.task.held_out // ranks) * config.evaluation.samples_per_problem,
    )
    slots = min(rollouts.rows_at_once, rows)
    held, remote = rollouts.mismatch.copies, is_remote(rollouts.engine)
    copies = every * min(held, 1) + trained * max(held - 1, 0)
    return Demand(
        shape=Shape.from_config(policy.body.config),
        size=size,
        tokens_per_pack=tokens,
        parameters=copies + (every if lora is None else every - trained),
        trained=trained,
        adapter_rank=0 if lora is None else lora.rank,
        eight_bit=training.optimizer == "adamw-8bit",
        offload=training.offload_optimizer and device == "cuda",
        reference=wire.wants_reference(resolved),
        value_head=policy.value_head is not None,
        # On a GPU the head keeps logits in 16 bits for at most this many tokens; elsewhere it takes a whole row.
        head_tokens=min(tokens, policy.tokens_at_once if half else max(policy.tokens_at_once, response)),
        logit_bytes=size if half else 0,
        # The plain engine frees its KV cache before an update, and those that it kept between turns end with their episodes.
        cached_tokens=slots * -(-prompt // 64) * 64 + (slots + 1) * response if device == "cuda" and not remote else 0,
        tables=policy.packing and (not half or scores),
        scores=scores,
        fused=policy.trains_fused,
        sharding=Sharding(
            way=training.shard if ranks > 1 else "none",
            ranks=ranks,
            resident=not remote,
            kept=KEPT[0] if training.keep_layers == "auto" else training.keep_layers,
        ),
        sharing=(prompt + each * (prompt + response)) / group,
        longest=prompt + response,
        **_routes(resolved, policy, ranks),
    )


def _demand_in(room: int | None, resolved: Resolved, policy: Policy, ranks: int) -> Demand:
    """The memory demand of a run that has so much room: the engine decodes fewer rows together where more do not fit."""
    demand, config = demand_of(resolved, policy, ranks), resolved.config
    if room is None or not demand.cached_tokens:
        return demand
    row = -(-config.policy.max_prompt_tokens // 64) * 64 + 2 * config.rollouts.max_response_tokens
    return limit_cache(demand, room, config.rollouts.kv_memory_share, row)


def _routes(resolved: Resolved, policy: Policy, ranks: int) -> dict[str, Any]:
    """The demand of recorded routes for a mixture of experts, with every response at its length limit."""
    if policy.routers is None:
        return {}
    config, training = resolved.config, resolved.config.training
    responses = config.rollouts.samples_per_prompt * config.rollouts.max_response_tokens
    sampled, replayed = (
        training.prompts_per_step * each for each in (responses, responses + config.policy.max_prompt_tokens)
    )
    pieces = config.task.environment is not None
    whole = holds_all_routes(resolved.algorithm, training.epochs_per_step, pieces=pieces)
    own = sampled if whole else -(-training.prompts_per_step // ranks) * responses
    recorded = config.rollouts.record_routes is not False and not is_remote(config.rollouts.engine)
    return {
        "routed": own,
        "routed_per_update": -(-training.prompts_per_step // training.updates_per_step) * responses,
        "engine_routed": sampled if recorded else 0,
        "replayed": 0 if training.routing_replay == "off" else replayed,
    }


def decide_checkpointing(resolved: Resolved, policy: Policy, world: World | None = None) -> None:
    """Refuse a run that cannot fit. With "auto", turn on gradient checkpointing if activations do not fit.

    The decision and its reason are added to the policy's notes.
    """
    auto = resolved.config.policy.gradient_checkpointing == "auto"
    room = _room(policy, world or OneProcess())
    try:
        demand = _demand_in(room, resolved, policy, (world or OneProcess()).size)
    except InputError as error:
        if auto:
            policy.notes.append(f"gradient checkpointing is off: {error}")
        return
    if room is None:
        if auto:
            policy.notes.append("gradient checkpointing is off: this system does not say how much memory there is")
        return
    longest = resolved.config.policy.max_prompt_tokens + resolved.config.rollouts.max_response_tokens
    refuse_if_too_large(demand, room, longest, policy.name, on_gpu=policy.device.type == "cuda")
    if not auto:
        return
    fitting = fit(demand, room, smallest=longest)
    note = _decision_note(demand, fitting, room)
    # The rank with the least free memory decides for all. If only some recomputed their layers, the others would wait.
    if (world or OneProcess()).agree(int(fitting.checkpointing)):
        if getattr(policy.model, "supports_gradient_checkpointing", True):
            recompute_layers(policy)
        else:
            note = f"this model does not support it, but {note}"
    policy.notes.append(note)


def decide_kept(resolved: Resolved, policy: Policy, world: World) -> str:
    """What the ranks of training.shard = "layers" hold whole during updates: as configured, or the most that fits on all.

    Call it before the layers are divided, on all ranks. The decision is added to the policy's notes.
    """
    kept = resolved.config.training.keep_layers
    if kept == "auto":
        most = len(KEPT) - 1
        # The rank with the least free memory decides for all.
        kept = KEPT[most - world.agree(most - KEPT.index(_most_kept(resolved, policy, world)))]
    policy.notes.append(describe_kept(kept, adapters=resolved.config.policy.lora is not None))
    return kept


def _most_kept(resolved: Resolved, policy: Policy, world: World) -> str:
    """The most of `KEPT` that fits on this rank; the least where that cannot be told."""
    room = _room(policy, world)
    try:
        demand = _demand_in(room, resolved, policy, world.size)
    except InputError:
        return KEPT[0]
    recomputes = bool(policy.model.training)  # only then (`recompute_layers`)
    return KEPT[0] if room is None else most_kept(demand, room, checkpointing=recomputes)


def _room(policy: Policy, world: World) -> int | None:
    """Bytes that this rank may use."""
    launch = read_launch() if world.size > 1 else None
    return available(policy.device, 1 if launch is None else launch.local_size)


def _decision_note(demand: Demand, fitting: Fit, room: int) -> str:
    plain, less = (demand.memory(checkpointing=each).total for each in (False, True))
    have = f"there are {gigabytes(room)}"
    if not fitting.checkpointing:
        return f"gradient checkpointing is off: {gigabytes(plain)} are needed, {have}"
    words = f"gradient checkpointing is on: {gigabytes(plain)} would be needed without it, {gigabytes(less)} with it, {have}"
    if fitting.tokens_per_pack == demand.tokens_per_pack and fitting.fits:
        return words
    if fitting.fits:
        return f"{words}; training.tokens_per_pack={fitting.tokens_per_pack} would fit"
    return f"{words}; no pack fits: a smaller model, policy.lora or training.offload_optimizer=true would help"
