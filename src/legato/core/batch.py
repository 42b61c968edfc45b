"""The scored rollouts of a step as tables: one row per rollout, `[B, T]` per token, padded at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from legato.core.rollout import Group, Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """An example: two groups of two rollouts, responses of 2, 3, 1 and 3 tokens.

    group    0 0 1 1
    lengths  2 3 1 3
    mask     1 1 0 / 1 1 1 / 1 0 0 / 1 1 1
    """

    prompts: Tensor
    """[G, P], padded at the end."""
    prompt_lengths: Tensor
    group: Tensor
    """[B], dense from 0: the row of `prompts`."""
    tokens: Tensor
    lengths: Tensor
    """[B]: from the first sampled token to the last, tool tokens inside included."""
    mask: Tensor
    """[B, T] bool: what the policy wrote."""
    turn: Tensor
    version: Tensor
    sampler_logprobs: Tensor
    kept_logmass: Tensor | None
    temperature: Tensor
    rewards: Tensor
    """[B] float64"""
    accuracy: Tensor
    components: Mapping[str, Tensor]
    truncated: Tensor
    rollout_id: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def collate(groups: Sequence[Group], dtype: torch.dtype = torch.float32) -> Batch:
    """Groups to tables. Values are checked here, once, so that nothing inside an update has to look at them."""
    members = [(number, member) for number, group in enumerate(groups) for member in group.members]
    for _, member in members:
        _check(member)
    rollouts = [member.rollout for _, member in members]
    scores = [member.score for _, member in members]
    prompts = [group.members[0].rollout.prompt_tokens for group in groups]
    truncation = [rollout.kept_logmass for rollout in rollouts]
    kept = None
    if any(mass is not None for mass in truncation):
        masses = zip(truncation, rollouts, strict=True)
        kept = _table([torch.zeros_like(r.sampler_logprobs) if mass is None else mass for mass, r in masses]).to(dtype)
    names = sorted({name for score in scores for name in score.components})
    return Batch(
        prompts=_table(prompts),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        group=torch.tensor([number for number, _ in members]),
        tokens=_table([rollout.tokens for rollout in rollouts]),
        lengths=torch.tensor([len(rollout.tokens) for rollout in rollouts]),
        mask=_table([rollout.mask for rollout in rollouts]),
        turn=_table([rollout.turn for rollout in rollouts], padding=-1),
        version=_table([rollout.version for rollout in rollouts]),
        sampler_logprobs=_table([rollout.sampler_logprobs for rollout in rollouts]).to(dtype),
        kept_logmass=kept,
        temperature=torch.tensor([rollout.temperature for rollout in rollouts], dtype=dtype),
        rewards=torch.tensor([score.reward for score in scores], dtype=torch.float64),
        accuracy=torch.tensor([score.accuracy for score in scores], dtype=torch.float64),
        components={
            name: torch.tensor([score.components.get(name, 0.0) for score in scores], dtype=torch.float64) for name in names
        },
        truncated=torch.tensor([rollout.stop.truncated for rollout in rollouts]),
        rollout_id=torch.tensor([rollout.rollout_id for rollout in rollouts]),
    )


def _table(rows: Sequence[Tensor], padding: int = 0) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=padding)


def _check(member: Scored) -> None:
    rollout = member.rollout
    where = f"rollout {rollout.rollout_id} of {rollout.problem.key}"
    if rollout.temperature <= 0:
        raise ValueError(f"{where} was sampled at temperature {rollout.temperature:g}; training needs a temperature above 0")
    sampled = rollout.sampler_logprobs[rollout.mask]
    if not bool(torch.isfinite(sampled).all()) or bool((sampled > 0).any()):
        raise ValueError(f"{where}: the engine reported a log-prob that is above 0 or not finite")
