"""A finished response as rewards see it."""

import torch

from legato.core.rollout import Problem, Rollout, StopReason


def response(problem: Problem, text: str, length: int = 1) -> Rollout:
    """A rollout of so many tokens that says `text`."""
    whole = torch.zeros(length, dtype=torch.long)
    return Rollout(
        problem=problem,
        rollout_id=0,
        prompt_tokens=whole,
        tokens=whole,
        sampler_logprobs=torch.zeros(length),
        version=whole,
        text=text,
        stop=StopReason.END_TOKEN,
        temperature=1.0,
        mask=torch.ones(length, dtype=torch.bool),
        turn=whole,
        author=whole,
    )
