"""What the processes of a world compute in tests. Each function gets the world and returns JSON.

Runs are in float64 throughout, so that one process and several must agree to the last digits: transformers computes norms
and routers in float32 whatever the dtype of the weights, and that is replaced here.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from legato.config.load import load
from legato.core.generators import seed_generators
from legato.core.world import OneProcess, World
from legato.policy.model.reference import Reference
from legato.run import wire
from legato.training import update as update_module
from legato.training.pieces import Divided
from legato.training.ranks.process_group import ProcessGroup
from legato.training.report import StepReport
from legato.training.step import Trainer

REWARD = "tests.proof.verdicts:early"
SMALL: dict[str, Any] = {
    "policy.dtype": "float64",
    "policy.tiny.hidden": 32,
    "policy.tiny.layers": 2,
    "policy.tiny.heads": 2,
    "policy.max_prompt_tokens": 16,
    "task.left_digits": 1,
    "task.held_out": 4,
    "reward.kind": REWARD,
    "rollouts.samples_per_prompt": 4,
    "rollouts.max_response_tokens": 6,
    "training.prompts_per_step": 6,
    "training.updates_per_step": 2,
    "training.tokens_per_pack": 64,
    "training.lr": 3e-3,
    "training.epsilon": 1e-4,
    "training.steps": 3,
}


def _norm(module: Any, hidden: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    normed: Tensor = module.weight * (hidden * scale)
    return normed


def _route(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden.reshape(-1, module.weight.shape[1]) @ module.weight.T
    scores, experts = logits.softmax(-1).topk(module.top_k, dim=-1)
    return logits, scores / scores.sum(-1, keepdim=True), experts


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    with (
        patch.object(modeling_qwen3.Qwen3RMSNorm, "forward", _norm),
        patch.object(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", _norm),
        patch.object(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", _route),
    ):
        yield


def build(options: dict[str, Any], world: World) -> Trainer:
    """The trainer of a small run."""
    resolved, given = load([], (), {**SMALL, **options}), wire.PythonObjects()
    seed_generators(0)
    policy, source = wire.policy_of(resolved, given), wire.source_of(resolved.config, given)
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, given), world=world)
    reference = Reference.from_policy(policy) if wire.wants_reference(resolved) else None
    return wire.trainer_of(resolved, policy, collector, reference)


def whole(weight: Any) -> Tensor:
    """A weight, gathered if it is divided."""
    gathered: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return gathered.detach()


def compare(world: World, options: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """The largest differences between a run on these ranks and one on one process."""
    with in_float64():
        ranked = build(options, world)
        reports = [ranked.step(100) for _ in range(steps)]
        weights = {name: whole(weight) for name, weight in ranked.policy.parameters().items()}
        if world.rank:
            return {"packs": []}
        alone = build({path: value for path, value in options.items() if path != "training.shard"}, OneProcess())
        expected = [alone.step(100) for _ in range(steps)]
    rows = zip(reports, expected, strict=True)
    return {
        "weights": max(float((weights[name] - whole(p)).abs().max()) for name, p in alone.policy.parameters().items()),
        "metrics": max((_difference(*pair) for pair in rows), key=lambda each: each[0]),
        "moved": max(float(r.metrics["gradient/norm"]) for r in expected),
        "details": [len(r.details) for r in reports] == [len(r.details) for r in expected],
        "choices": [ranked.anchor_choice, ranked.source.drawn] == [alone.anchor_choice, alone.source.drawn],
    }


def _difference(left: StepReport, right: StepReport) -> tuple[float, str]:
    """The largest difference of a metric, relative to its size, and its key. Times are left out."""
    worst = (0.0, "")
    for key in {*left.metrics, *right.metrics}:
        if key.startswith("time/") or key.endswith("per_second"):
            continue
        a, b = left.metrics.get(key, math.inf), right.metrics.get(key, -math.inf)
        if math.isnan(a) and math.isnan(b):
            continue
        if key.partition("@")[0].endswith(("_std", "deviation")):
            a, b = a * a, b * b  # a deviation near 0 is the root of what rounding left
        difference = abs(a - b) / (1 + abs(b))
        if not difference <= worst[0]:
            worst = (difference, key)
    return worst


def one_update_in_float32(world: World, shard: str) -> float:
    """How far the weights are apart after one update on the same rollouts, in float32."""
    options = {"policy.dtype": "float32", "training.updates_per_step": 1, "training.shard": shard, "training.lr": 1e-3}
    ranked = build(options, world)
    ranked.step()
    weights = {name: whole(weight) for name, weight in ranked.policy.parameters().items()}
    if world.rank:
        return 0.0
    alone = build({**options, "training.shard": "optimizer"}, OneProcess())
    alone.step()
    return max(float((weights[name] - p.detach()).abs().max()) for name, p in alone.policy.parameters().items())


def norm_in_bfloat16(world: World, keep: str) -> list[float]:
    """The norms of the gradient of divided layers and of one process, in bfloat16; gradients are float32."""
    options = {"policy.dtype": "bfloat16", "training.updates_per_step": 1, "algorithm": "grpo"}
    ranked = build({**options, "training.shard": "layers", "training.keep_layers": keep}, world)
    norm = ranked.step().metrics["gradient/norm"]
    return [float(norm), float(build(options, OneProcess()).step().metrics["gradient/norm"])]


def kept_during_a_step(world: World, keep: str) -> dict[str, Any]:
    """Whether layers are whole inside a step and divided after it, also after an error on all ranks."""
    from torch.distributed.tensor import DTensor

    trainer = build({"algorithm": "grpo", "training.shard": "layers", "training.keep_layers": keep}, world)
    counts: list[list[int]] = []
    hooks: list[int] = []

    def count() -> list[int]:
        weights = [weight for name, weight in trainer.policy.model.named_parameters() if ".layers." in name]
        return [sum(isinstance(weight, DTensor) for weight in weights), len(weights)]

    def count_hooks() -> int:
        layers = trainer.policy.body.get_decoder().layers
        return sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers)

    def look(_: Any) -> None:
        counts.append(count())
        hooks.append(count_hooks())
        raise ValueError("an error in an update")

    trainer.step()
    after = [count()]
    trainer.look = look
    try:
        trainer.step()
    except ValueError:
        after.append(count())
    trainer.look = None
    hooks.append(count_hooks())
    return {"inside": counts[0], "after": after, "exchanges": trainer.policy.exchanges, "hooks": hooks}


def mutated(world: World, mutation: str) -> dict[str, Any]:
    """The comparison with a fault built in on purpose; it must be noticed."""
    with _MUTATIONS[mutation](world):
        return compare(world, {"algorithm": "grpo"}, steps=1)


@contextlib.contextmanager
def _averaging(world: World) -> Iterator[None]:
    reduce_scatter = ProcessGroup.reduce_scatter

    def average(self: ProcessGroup, flat: Tensor) -> Tensor:
        return reduce_scatter(self, flat) / self.size

    with patch.object(ProcessGroup, "reduce_scatter", average):
        yield


@contextlib.contextmanager
def _own_counts(world: World) -> Iterator[None]:
    """Counts over the rows of one rank."""
    count = update_module.count_update

    def count_share(algorithm: Any, tables: Any, update: Any) -> Any:
        share = update.share(world.rank) if world.size > 1 else update.micro_batches
        return count(algorithm, tables, type(update)(index=0, epoch=0, micro_batches=tuple(share)))

    with patch("legato.training.step.count_update", lambda a, t, u: count_share(a, t, u) if u.owners else count(a, t, u)):
        yield


@contextlib.contextmanager
def _choice_not_agreed(world: World) -> Iterator[None]:
    """Rank 1 takes the sampler as anchor, whatever the others do."""
    probe = Trainer._probe

    def stray(self: Trainer, tables: Any) -> Any:
        floor = probe(self, tables)
        if self.world.rank == 1:
            self.anchor_choice = "recompute" if self.anchor_choice == "sampler" else "sampler"
        return floor

    with patch.object(Trainer, "_probe", stray):
        yield


@contextlib.contextmanager
def _pack_too_few(world: World) -> Iterator[None]:
    share = update_module.Update.share

    def lose_one(self: Any, rank: int) -> list[Tensor]:
        batches = share(self, rank)
        return batches[:-1] if self.owners and rank == 1 else batches

    with patch.object(update_module.Update, "share", lose_one):
        yield


_MUTATIONS = {
    "averaging": _averaging,
    "own counts": _own_counts,
    "choice not agreed": _choice_not_agreed,
    "pack too few": _pack_too_few,
}


def gathered(world: World) -> dict[str, Any]:
    """Whether divided weights are gathered whole, without DTensor's own gathering, in which gloo crashes on a GPU."""
    from torch.distributed.tensor import DTensor

    from legato.training.ranks.layers import gather_weights

    assert isinstance(world, ProcessGroup)
    # Three heads: some shapes are not even.
    policy = build({"training.shard": "layers", "policy.tiny.hidden": 48, "policy.tiny.heads": 3}, world).policy
    expected = {name: whole(weight) for name, weight in policy.model.named_parameters()}
    with patch.object(DTensor, "full_tensor", side_effect=AssertionError("full_tensor")):
        weights = dict(gather_weights(policy, world, trained=False))
    divided = sum(isinstance(weight, DTensor) for weight in policy.model.parameters())
    same = weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    return {"same": same, "divided": divided}


def failing_rank(world: World) -> dict[str, Any]:
    """What ranks learn when rank 1 fails while the others are in an exchange of another kind."""
    from legato.errors import InputError, OtherRankError

    if world.rank == 1:
        world.fail(InputError("expected a, got b"))
        return {"told": True}
    try:
        world.gather("something else")
    except OtherRankError as error:
        return {"message": str(error), "is_input": error.is_input, "signal": error.signal}
    return {}


def apart(world: World) -> dict[str, Any]:
    """What ranks learn when they want different operations."""
    try:
        if world.rank == 1:
            world.agree(1)
        else:
            world.gather(1)
    except RuntimeError as error:
        return {"message": str(error)}
    return {}


def pieces(world: World) -> dict[str, Any]:
    """Which numbers of which weights a rank optimises."""
    sizes = {"square": (6, 4), "tall": (5, 2), "flat": (1, 7), "vector": (3,)}
    weights = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    assert isinstance(world, ProcessGroup)
    return {name: [piece.start, piece.stop] for name, piece in Divided(weights, world).pieces.items()}


def not_a_number(world: World) -> dict[str, Any]:
    """What a NaN in the gradient of rank 1 does to the weights of each rank."""
    trainer = build({"algorithm": "gspo", "training.updates_per_step": 1}, world)
    before = {name: weight.detach().clone() for name, weight in trainer.policy.parameters().items()}
    gradients = Divided.gradients

    def spoil(self: Divided) -> dict[str, Tensor]:
        if world.rank == 1:
            next(iter(self.weights.values())).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
        return gradients(self)

    with patch.object(Divided, "gradients", spoil):
        report = trainer.step()
    after = trainer.policy.parameters()
    return {
        "applied": report.metrics["update/applied"],
        "moved": max(float((before[name] - weight.detach()).abs().max()) for name, weight in after.items()),
    }


def full_disk(world: World) -> dict[str, Any]:
    """What ranks learn when the disk of rank 1 is full while all write their share of a checkpoint."""
    from legato.records.room import DiskFullError
    from legato.training.checkpoint import together

    def write() -> str:
        if world.rank == 1:
            raise DiskFullError("no room in /there")
        return "written"

    try:
        together(world, write)
    except DiskFullError as error:
        return {"message": str(error)}
    return {}
