"""What an experiment stands on: the user's policy and task made ready, a trainer, and eyes on every update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.config.resolved import Resolved
from legato.config.sources import parted
from legato.core.batch import collate
from legato.core.rollout import Group
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy
from legato.run import wire
from legato.run.target import Target, find
from legato.training.plan import plan
from legato.training.report import StepReport
from legato.training.step import Trainer
from legato.training.update import Look

DEFAULT = Path(__file__).parent / "default.toml"

Say = Callable[[str], None]


def split_target(words: Sequence[str]) -> tuple[str, list[str]]:
    """The target among the words of a command (a recipe, a run or a model; else the default), and the options."""
    targets, options = parted(words)
    if len(targets) > 1:
        raise InputError(
            f"{targets[0]!r} and {targets[1]!r} are given; one recipe, run or model is allowed, then path=value"
        )
    return targets[0] if targets else str(DEFAULT), options


def target_of(words: Sequence[str]) -> Target:
    """What a command of the laboratory was pointed at."""
    return find(*split_target(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedUpdate:
    """One update as its objective saw it, in float64 on the CPU; its rows are responses that have a token."""

    step: int
    index: int
    """k: the number of the update within its step, from 0."""
    rows: Tensor
    """Which rows of the step they are."""
    new: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor
    """[n]: of a response, its mean where it varies."""
    clipped: Tensor
    """[n] bool: the response has an advantage and no coefficient."""
    clipped_tokens: Tensor
    """[n]: how many of its tokens the trust region left without one."""
    precision: torch.dtype
    """In which they were trained."""

    @property
    def log_ratios(self) -> Tensor:
        """new - old, 0 outside the mask."""
        return torch.where(self.mask, self.new - self.old, 0.0)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    @property
    def log_s(self) -> Tensor:
        return self.log_ratios.sum(1) / self.lengths


def observe_update(update: Look, step: int) -> ObservedUpdate:
    """What can be kept of a look."""
    signals = update.signals
    tokens = signals.mask.tokens.cpu()
    counted = tokens.any(1)
    new = signals.logprobs.detach().cpu()
    old = new if signals.old_logprobs is None else signals.old_logprobs.detach().cpu()
    advantages = signals.advantages.detach().cpu().double().expand(tokens.shape)
    silent = (update.outcome.coefficients.detach().cpu() == 0) & tokens & (advantages != 0)
    return ObservedUpdate(
        step=step,
        index=update.update.index,
        rows=update.rows[counted],
        new=torch.where(tokens, new.double(), 0.0)[counted],
        old=torch.where(tokens, old.double(), 0.0)[counted],
        mask=tokens[counted],
        advantages=(torch.where(tokens, advantages, 0.0).sum(1) / tokens.sum(1).clamp(min=1))[counted],
        clipped=((silent.sum(1) == tokens.sum(1)) & tokens.any(1))[counted],
        clipped_tokens=silent.sum(1)[counted],
        precision=new.dtype,
    )


@dataclass(slots=True, kw_only=True)
class UpdateRecorder:
    """A policy in training whose updates are seen."""

    resolved: Resolved
    policy: Policy
    trainer: Trainer
    observed: list[ObservedUpdate] = field(default_factory=list)

    def step(self) -> StepReport:
        """Train one step; what its updates saw is added to `seen`."""
        number = self.trainer.steps_done + 1
        self.trainer.look = lambda look: self.observed.append(observe_update(look, number))
        try:
            return self.trainer.step()
        finally:
            self.trainer.look = None

    def groups(self, prompts: int) -> list[Group]:
        """Fresh responses of the policy as it is, on problems that training comes to later."""
        groups, tally = self.trainer.collector.next(prompts)
        if not groups:
            reasons = "; ".join(tally.reasons) or "no group had two scored responses"
            raise InputError(f"nothing was sampled that could be scored: {reasons}")
        return groups


def make_recorder(target: Target, say: Say, **training: Any) -> UpdateRecorder:
    """The recorder of a target; `training` are options of that section that win over the configuration's."""
    policy, source = target.ready(say)
    return recorder_of(target.resolved, policy, source, **training)


def recorder_of(resolved: Resolved, policy: Policy, source: Any, **training: Any) -> UpdateRecorder:
    """The same for a policy that is there."""
    # Responses without an advantage are not trained on, but their ratios are measured like all others.
    options = {"skip_silent_rows": False, **training}
    config = replace(resolved.config, training=replace(resolved.config.training, **options))
    resolved = replace(resolved, config=config)
    collector = wire.collector_of(config, policy, source, wire.reward_of(config, wire.Given()))
    reference = Reference.of(policy) if wire.wants_reference(resolved) else None
    return UpdateRecorder(resolved=resolved, policy=policy, trainer=wire.trainer_of(resolved, policy, collector, reference))


def channels_of(policy: Policy, groups: Sequence[Group], temperature: float | None = None) -> tuple[Tensor, Tensor]:
    """[B, T] log-probs and entropies of responses under the policy as it is, float64; at another temperature if given."""
    batch = collate(groups, policy.dtype)
    texts = batch.texts
    if temperature is not None:
        texts = replace(texts, temperature=torch.full_like(texts.temperature, temperature))
    shape = texts.tokens.shape
    logprobs, entropy = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    updates = plan(texts, updates=1, epochs=1, tokens_per_pack=16384, seed=0, packing=policy.packing)
    for rows in updates[0].micro_batches:
        channels = policy.score(texts, rows)
        width = channels.logprobs.shape[1]
        logprobs[rows, :width] = channels.logprobs.cpu().double()
        entropy[rows, :width] = channels.entropy.cpu().double()
    return logprobs, entropy


def facts(recorder: UpdateRecorder) -> dict[str, str]:
    """What a page says of where an experiment ran."""
    config = recorder.resolved.config
    training = config.training
    weights = str(recorder.policy.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    return {
        "model": recorder.policy.name,
        "weights": f"{weights} on {recorder.policy.device.type}",
        "task": config.task.kind,
        "algorithm": recorder.resolved.algorithm.name,
        "lr": f"{training.lr:g}",
        "a step": f"{training.prompts_per_step} prompts x {config.rollouts.samples_per_prompt},"
        f" {count(training.updates_per_step * training.epochs_per_step, 'update')}",
        "seed": str(training.seed),
    }
