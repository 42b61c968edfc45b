"""A trainer for experiments: the user's policy and task, with every update recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.config.resolved import Resolved
from legato.config.sources import split_words
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
    """Split the words of a command into the target (recipe, run or model; else the default) and the options."""
    targets, options = split_words(words)
    if len(targets) > 1:
        raise InputError(f"expected one recipe, run or model, then path=value, got {targets[0]!r} and {targets[1]!r}")
    return targets[0] if targets else str(DEFAULT), options


def target_of(words: Sequence[str]) -> Target:
    """Return the target of a `legato lab` command."""
    return find(*split_target(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedUpdate:
    """One update as its objective saw it, in float64 on the CPU. Rows are the n responses that have a token."""

    step: int
    index: int
    """k: the number of the update within its step, from 0."""
    rows: Tensor
    """[n]: their row numbers within the step."""
    new: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor
    """[n]: the mean advantage of each response."""
    clipped: Tensor
    """[n] bool: the response has an advantage and all its coefficients are 0."""
    clipped_tokens: Tensor
    """[n]: number of tokens with an advantage and coefficient 0."""
    precision: torch.dtype
    """The dtype of the log-probs in training."""

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
    """Copy the numbers of an update to the CPU."""
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
    """A trainer that records every update."""

    resolved: Resolved
    policy: Policy
    trainer: Trainer
    observed: list[ObservedUpdate] = field(default_factory=list)

    def step(self) -> StepReport:
        """Train one step and append its updates to `observed`."""
        number = self.trainer.steps_done + 1
        self.trainer.look = lambda look: self.observed.append(observe_update(look, number))
        try:
            return self.trainer.step()
        finally:
            self.trainer.look = None

    def groups(self, prompts: int) -> list[Group]:
        """Sample responses of the current policy on the next problems."""
        groups, tally = self.trainer.source.next(prompts)
        if not groups:
            reasons = "; ".join(tally.reasons) or "no group had two scored responses"
            raise InputError(f"nothing was sampled that could be scored: {reasons}")
        return groups


def make_recorder(target: Target, say: Say, **training: Any) -> UpdateRecorder:
    """Return the recorder of a target. `training` overrides options of that section."""
    policy, source = target.prepare(say)
    return recorder_of(target.resolved, policy, source, **training)


def recorder_of(resolved: Resolved, policy: Policy, source: Any, **training: Any) -> UpdateRecorder:
    """Return the recorder of a loaded policy. `training` overrides options of that section."""
    # Responses without an advantage are not trained on, but their ratios are measured like all others.
    options = {"skip_silent_rows": False, **training}
    config = replace(resolved.config, training=replace(resolved.config.training, **options))
    resolved = replace(resolved, config=config)
    collector = wire.collector_of(config, policy, source, wire.reward_of(config, wire.PythonObjects()))
    reference = Reference.from_policy(policy) if wire.wants_reference(resolved) else None
    return UpdateRecorder(resolved=resolved, policy=policy, trainer=wire.trainer_of(resolved, policy, collector, reference))


def channels_of(policy: Policy, groups: Sequence[Group], temperature: float | None = None) -> tuple[Tensor, Tensor]:
    """Score responses under the current policy: log-probs and entropies [B, T], float64, at `temperature` if given."""
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
    """Return model, task and settings of an experiment, to show on its page."""
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
