"""A run on certain GPUs, as far as memory and time depend on it."""

import math
from dataclasses import dataclass, replace

from legato.capacity.hardware import Hardware
from legato.capacity.model import Model
from legato.config.resolved import Resolved
from legato.errors import InputError
from legato.training.anchor import first_update_anchors_itself, holds_all_routes, needs_reference
from legato.training.memory.sharding import WAYS
from legato.training.plan import CUTS
from legato.training.tables import needs

_SIZES = {"auto": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_LONE = "none"
_SHARDED = "optimizer"
"""The way of sharding where there are several GPUs and none is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the busiest GPU has of an update: groups, or pieces of groups that were cut to make shares even."""

    pieces: int
    rows: int
    """Responses of the largest piece. The prompt of a piece is computed once."""
    responses: int
    """Responses of all pieces together."""
    idle_gpus: int
    """GPUs that have nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, its GPUs and the settings of a run. Lengths in tokens are limits; `mean_...` are what times count with."""

    model: Model
    hardware: Hardware
    gpus: int
    prompts: int
    """Prompts of a step, on all GPUs together."""
    samples: int
    prompt_tokens: int
    response_tokens: int
    mean_prompt: int
    mean_response: int
    updates: int
    tokens_per_pack: int
    rows_at_once: int
    kv_memory_share: float
    keep_layers: str
    """With `shard` = "layers": what a GPU holds whole during updates, one of `KEPT`; "auto": the most that fits."""
    epochs: int = 1
    evaluated: int = 0
    """Responses of an evaluation, which the engine may decode together too."""
    checkpointing: bool | None = None
    """Whether layers are recomputed; None: if activations do not fit."""
    size: int = 2
    """Bytes per weight."""
    trained: int | None = None
    """Number of trained weights; None: all, or all adapters."""
    lora_rank: int = 0
    eight_bit: bool = False
    offload: bool = False
    shard: str = _LONE
    servers: bool = False
    """Whether responses are sampled on other machines."""
    reference: bool = False
    value_head: bool = False
    copies: int = 0
    """Further copies of the weights, of a sampler that differs on purpose."""
    scored_share: float = 1.0
    """The share of a step's tokens whose old log-probs are computed in a pass of their own."""
    passes: int = 1
    routing_replay: bool = False
    engine_routes: bool = True
    all_routes: bool = False
    """Whether every GPU holds the trainer's routes of all rows of a step."""

    def __post_init__(self) -> None:
        if self.shard not in WAYS:
            raise InputError(f"expected one of {', '.join(WAYS[1:])}, got {self.shard!r} (training.shard)")
        if self.gpus < 1:
            raise InputError(f"expected at least one GPU, got {self.gpus} (--gpus)")

    @property
    def longest(self) -> int:
        """Tokens of the longest text: a pack holds at least one."""
        return self.prompt_tokens + self.response_tokens

    @property
    def fused(self) -> bool:
        """Whether training uses fused layer parts."""
        return self.model.fused and self.size == 2

    @property
    def by_parts(self) -> bool:
        """Whether fused layers run part by part: adapters are modules of their own."""
        return self.fused and self.lora_rank > 0

    @property
    def groups(self) -> int:
        """Groups of a step that the busiest GPU samples. One GPU samples all responses of a group."""
        return math.ceil(self.prompts / self.gpus)

    def share_of_update(self, prompt: int, response: int) -> Share:
        """What the busiest GPU has of an update with such lengths, as `training.plan.deal` cuts and deals equal groups."""
        groups = math.ceil(self.prompts / self.updates)
        if self.gpus == 1:
            return Share(pieces=groups, rows=self.samples, responses=groups * self.samples, idle_gpus=0)
        shares = []
        for cuts in CUTS:
            # A piece is never larger than a pack.
            most = min(math.ceil(self.samples * response / cuts), self.tokens_per_pack - prompt)
            rows = max(1, most // response)
            shares.append(_deal_equal_groups(groups, self.samples, rows, self.gpus, prompt, response))
        return min(shares, key=lambda share: share.pieces * prompt + share.responses * response)

    @property
    def response_total(self) -> int:
        """Response tokens of a step on all GPUs."""
        return self.prompts * self.samples * self.mean_response

    def on(self, gpus: int, shard: str | None = None) -> "Setup":
        """The same run on another number of GPUs."""
        way = shard or (self.shard if self.shard != _LONE or gpus == 1 else _SHARDED)
        return replace(self, gpus=gpus, shard=way if gpus > 1 or shard else _LONE)


def _deal_equal_groups(groups: int, samples: int, rows: int, gpus: int, prompt: int, response: int) -> Share:
    """The largest share of groups that are cut into pieces of `rows` responses and one of the rest.

    The largest pieces are dealt first, and each piece goes to the GPU with the fewest tokens so far.
    """
    whole, rest = divmod(samples, rows)
    each, more = divmod(groups * whole, gpus)
    # [whole pieces, pieces of the rest, GPUs that have so many]
    alike = [[each, 0, gpus - more], [each + 1, 0, more]]

    def tokens(share: list[int]) -> int:
        return share[0] * (prompt + rows * response) + share[1] * (prompt + rest * response)

    left = groups if rest else 0
    while left:
        fewest = min((share for share in alike if share[2]), key=tokens)
        if left < fewest[2]:
            alike.append([fewest[0], fewest[1], fewest[2] - left])
            fewest[2] = left
        fewest[1] += 1
        left -= fewest[2]
    busiest = max((share for share in alike if share[2]), key=tokens)
    return Share(
        pieces=busiest[0] + busiest[1],
        rows=rows,
        responses=busiest[0] * rows + busiest[1] * rest,
        idle_gpus=sum(count for first, second, count in alike if not first + second),
    )


def setup_of(
    resolved: Resolved,
    model: Model,
    hardware: Hardware,
    gpus: int,
    *,
    shard: str | None = None,
    mean_prompt: int | None = None,
    mean_response: int | None = None,
) -> Setup:
    """The setup of a configuration. `shard` None: the configuration's, else "optimizer" on several GPUs."""
    config = resolved.config
    policy, rollouts, training, algorithm = config.policy, config.rollouts, config.training, resolved.algorithm
    if policy.upcycle is not None:
        raise InputError("expected a model as it is, got policy.upcycle; plan the folder of the upcycled model instead")
    if not policy.packing:
        raise InputError("expected policy.packing = true, got false; padded rows are not planned")
    wanted = shard or getattr(training, "shard", None) or (_SHARDED if gpus > 1 else _LONE)
    anchored = first_update_anchors_itself(algorithm, training.epochs_per_step) and not training.router_noise
    updates = min(training.updates_per_step, training.prompts_per_step)
    value_head = "values" in needs(algorithm)
    scored = 0.0 if training.anchor == "sampler" else (updates - 1) / updates if anchored and not value_head else 1.0
    checkpointing = policy.gradient_checkpointing
    return Setup(
        model=model,
        hardware=hardware,
        gpus=gpus,
        prompts=training.prompts_per_step,
        samples=rollouts.samples_per_prompt,
        prompt_tokens=policy.max_prompt_tokens,
        response_tokens=rollouts.max_response_tokens,
        mean_prompt=_mean(mean_prompt, policy.max_prompt_tokens, "--prompt-tokens"),
        mean_response=_mean(mean_response, rollouts.max_response_tokens, "--response-tokens"),
        updates=updates,
        epochs=training.epochs_per_step,
        tokens_per_pack=training.tokens_per_pack,
        rows_at_once=rollouts.rows_at_once,
        kv_memory_share=rollouts.kv_memory_share,
        evaluated=config.task.held_out * config.evaluation.samples_per_problem,
        checkpointing=checkpointing if isinstance(checkpointing, bool) else None,
        size=_SIZES[policy.dtype],
        trained=model.trained(policy.frozen) if policy.frozen and policy.lora is None else None,
        lora_rank=0 if policy.lora is None else policy.lora.rank,
        eight_bit=training.optimizer == "adamw-8bit",
        offload=training.offload_optimizer,
        shard=wanted if gpus > 1 else _LONE,
        keep_layers=training.keep_layers,
        servers=rollouts.engine != "local",
        reference=needs_reference(algorithm),
        value_head=value_head,
        copies=rollouts.mismatch.copies,
        scored_share=scored,
        passes=2 if training.update_passes == "two" or training.load_balance else 1,
        routing_replay=training.routing_replay != "off",
        engine_routes=rollouts.record_routes is not False,
        all_routes=holds_all_routes(algorithm, training.epochs_per_step, pieces=config.task.environment is not None),
    )


def _mean(tokens: int | None, limit: int, option: str) -> int:
    if tokens is None:
        return limit
    if not 1 <= tokens <= limit:
        raise InputError(f"expected 1 to {limit} tokens, the limit of the recipe, got {tokens} ({option})")
    return tokens
