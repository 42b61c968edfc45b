"""Trains on two environments of verifiers, as `legato train` does, and checks the tokens of their rollouts. Prints JSON.

python verifiers_training.py FOLDER        the model, saved with its tokenizer
"""

import json
import sys
from typing import Any

import torch

from legato.config.load import load
from legato.core.generators import seed_generators
from legato.rollouts.scoring import score_texts
from legato.run import wire


def options(folder: str, taskset: str) -> dict[str, Any]:
    return {
        "policy.model": folder,
        "policy.device": "cpu",
        "policy.dtype": "float32",
        "policy.end_tokens": ["<|im_end|>"],  # as its chat template closes a turn
        "task.kind": "verifiers",
        "task.taskset": taskset,
        "task.environment": "verifiers",
        "task.held_out": 1,
        "task.held_out_share": 0.2,
        "rollouts.samples_per_prompt": 4,
        "rollouts.max_response_tokens": 120,
        "rollouts.temperature": 0.8,
        "training.prompts_per_step": 2,
        "training.steps": 1,
        "algorithm": "gspo",
    }


def train(folder: str, taskset: str) -> dict[str, Any]:
    """A step of a run on the taskset: rewards, rows, and how far the recorded log-probs are from those of the policy."""
    resolved = load([], overrides=options(folder, taskset))
    given = wire.PythonObjects()
    policy = wire.policy_of(resolved, given)
    seed_generators(0)
    source = wire.source_of(resolved.config, given)
    collector = wire.collector_of(resolved.config, policy, source, wire.reward_of(resolved.config, given))
    trainer = wire.trainer_of(resolved, policy, collector, None)
    groups, tally = collector.next(2)
    rollouts = [member.rollout for group in groups for member in group.members]
    gaps = []
    for rollout in rollouts:
        for row in rollout.rows:
            (scores,) = score_texts(policy, [torch.cat([row.prompt_tokens, row.tokens])], [rollout.temperature])
            own = scores.logprobs[len(row.prompt_tokens) - 1 :]
            gaps.append(float((own - row.sampler_logprobs)[row.mask].abs().max()))
    trainer.step()
    collector.close()
    return {
        "rewards": sorted({sum(rollout.turn_rewards or ()) for rollout in rollouts}),
        "turns": sorted({len(rollout.turn_rewards or ()) for rollout in rollouts}),
        "rows": sorted({len(rollout.rows) for rollout in rollouts}),
        "dialogue": next((rollout.dialogue for rollout in rollouts if rollout.dialogue), None),
        "gap": max(gaps),
        "unscorable": tally.unscorable,
        "reasons": tally.reasons,
    }


if __name__ == "__main__":
    print(json.dumps([train(sys.argv[1], taskset) for taskset in ("legato_additions", "legato_rounds")]))
