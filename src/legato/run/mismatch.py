"""`legato mismatch`: measures samplers that differ from the trainer, on the user's model and task."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from legato.config.resolved import Resolved
from legato.config.schema import Rollouts
from legato.core.generators import seed_generators
from legato.core.rollout import Group
from legato.errors import InputError
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy
from legato.rollouts import mismatch
from legato.run import wire
from legato.run.target import Target
from legato.tasks.source import Source
from legato.training.mismatch import score_groups, signals_of, study

KINDS = ("none", *mismatch.KINDS, "top-p")
_SIZED = {"perturbed": "size", "stale": "updates", "top-p": "top_p"}
_TOP_P = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """One kind of mismatch with its size: "int8", "perturbed:0.01", "stale:8", "top-p:0.9"."""

    kind: str
    size: float | int | None = None

    @classmethod
    def read(cls, word: str) -> "Sampler":
        """Parse a word like "stale:8"; InputError if it is not one."""
        kind, _, size = word.partition(":")
        if kind not in KINDS:
            raise InputError(f"expected one of {', '.join(KINDS)}, got {word!r} (--kinds)")
        if not size:
            return cls(kind=kind)
        if kind not in _SIZED:
            raise InputError(f"expected {kind!r} without a size, got {word!r} (--kinds); only {', '.join(_SIZED)} have one")
        try:
            value: float | int = int(size) if kind == "stale" else float(size)
        except ValueError:
            value = math.nan
        if not value > 0 or not math.isfinite(value) or (kind == "top-p" and value > 1):
            wanted = {"stale": "a whole number of updates", "top-p": "a probability", "perturbed": "a number above 0"}[kind]
            raise InputError(f"expected {wanted} after the colon, got {word!r} (--kinds)")
        return cls(kind=kind, size=value)

    @property
    def name(self) -> str:
        """The kind with its size, also if the size is the default."""
        defaults = {"perturbed": mismatch.Mismatch().noise, "stale": mismatch.Mismatch().age}
        size = self.size if self.size is not None else {**defaults, "top-p": _TOP_P}.get(self.kind)
        return self.kind if size is None else f"{self.kind}:{size:g}"

    def options_for(self, rollouts: Rollouts) -> Rollouts:
        """The rollout options of a run with this sampler."""
        if self.kind == "top-p":
            return replace(rollouts, top_p=self.size or _TOP_P, mismatch=mismatch.Mismatch())
        sized: dict[str, Any] = {} if self.size is None else {_SIZED[self.kind]: self.size}
        return replace(rollouts, mismatch=mismatch.Mismatch(kind=self.kind, **sized))


def parse_samplers(words: str) -> list[Sampler]:
    """Parse a list like "none,int8,stale:8"; no sampler may appear twice."""
    parsed = [Sampler.read(word) for word in re.split(r"[,\s]+", words.strip()) if word]
    repeated = {sampler.name for sampler in parsed if parsed.count(sampler) > 1}
    if not parsed or repeated:
        raise InputError(f"expected at least one of {', '.join(KINDS)} and none of them twice, got {words!r} (--kinds)")
    return parsed


def compare_samplers(
    target: Target,
    samplers: Sequence[Sampler],
    *,
    prompts: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure each sampler with `training/mismatch.py`, on the same problems with the same seeds."""
    resolved, config = target.resolved, target.resolved.config
    seed_generators(config.training.seed)
    policy, source = target.prepare(say)
    figures = {}
    for sampler in samplers:
        say(sampler.name)
        with restoring_weights(policy):
            groups = _rollouts(resolved, sampler, policy, source, prompts or config.training.prompts_per_step)
            tables = score_groups(policy, groups, config.training.tokens_per_pack)
            figures[sampler.name] = study(resolved.algorithm, signals_of(tables))
    return {
        "model": policy.name,
        "dtype": str(policy.model.get_input_embeddings().weight.dtype).removeprefix("torch."),
        "device": policy.device.type,
        "task": config.task.kind,
        "algorithm": resolved.algorithm.name,
        "lr": config.training.lr,
        "prompts": prompts or config.training.prompts_per_step,
        "samples_per_prompt": config.rollouts.samples_per_prompt,
        "seed": config.training.seed,
        "samplers": figures,
    }


def _rollouts(resolved: Resolved, sampler: Sampler, policy: Policy, source: Source, prompts: int) -> list[Group]:
    """Rollouts of a sampler. A stale sampler is made by training for `age` updates at the full learning rate."""
    config = replace(resolved.config, rollouts=sampler.options_for(resolved.config.rollouts))
    config = replace(config, training=replace(config.training, warm_up_updates=0, anchor="recompute"))
    # Keep groups that dynamic sampling would replace: they are part of the measurement.
    config = replace(config, task=replace(config.task, resampling="none"))
    reward = wire.reward_of(config, wire.PythonObjects())
    collector = wire.collector_of(config, policy, source, reward)
    settings = config.rollouts.mismatch
    if settings.kind == "stale":
        reference = Reference.from_policy(policy) if wire.wants_reference(resolved) else None
        trainer = wire.trainer_of(replace(resolved, config=config), policy, collector, reference)
        while (done := trainer.optimizer.updates) < settings.age:
            trainer.step()
            if trainer.optimizer.updates == done:
                raise InputError(f"cannot make the sampler {sampler.name}: a training step made no update")
        collector.go_to(0)
    groups, tally = collector.next(prompts)
    if not groups:
        reasons = "; ".join(tally.reasons) or "no group had two scored responses"
        raise InputError(f"expected rollouts that can be scored, got none: {reasons}")
    return groups


@contextmanager
def restoring_weights(policy: Policy) -> Iterator[None]:
    """A context that restores the policy's weights on exit."""
    before = {name: weight.detach().clone() for name, weight in policy.parameters().items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in policy.parameters().items():
                weight.copy_(before[name])
                weight.grad = None
