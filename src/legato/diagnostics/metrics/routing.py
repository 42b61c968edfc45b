"""Compares two routings of the same tokens in a mixture-of-experts policy.

Shapes: ... any leading dimensions (tokens), M layers with a router, E experts, K of them active.
"""

import torch
from jaxtyping import Float, Integer
from torch import Tensor


def router_shift(old_logprobs: Float[Tensor, "... M K"], new_logprobs: Float[Tensor, "... M K"]) -> Float[Tensor, "..."]:
    """gamma = exp(-mean over layers and experts of |log r_new - log r_old|), in (0, 1], not floored (RSPO).

    Both are log-probabilities over all experts, read at the K experts that were active under the old policy, at the
    position that predicts the token.
    """
    return (new_logprobs - old_logprobs).abs().mean(dim=(-2, -1)).neg().exp()


def shared_experts(old: Integer[Tensor, "... K"], new: Integer[Tensor, "... K"]) -> Integer[Tensor, "..."]:
    """Return how many of the K active experts are active both times."""
    return (old.unsqueeze(-1) == new.unsqueeze(-2)).any(-1).sum(-1)


def flip_rate(old: Integer[Tensor, "... K"], new: Integer[Tensor, "... K"]) -> Float[Tensor, "..."]:
    """1 - |old and new| / K per token and layer."""
    return 1 - shared_experts(old, new) / old.shape[-1]


def any_flip(old: Integer[Tensor, "... K"], new: Integer[Tensor, "... K"]) -> Float[Tensor, "..."]:
    """1 where at least one expert changed."""
    return (shared_experts(old, new) < old.shape[-1]).float()


def jaccard_distance(old: Integer[Tensor, "... K"], new: Integer[Tensor, "... K"]) -> Float[Tensor, "..."]:
    """1 - |old and new| / |old or new|."""
    shared = shared_experts(old, new)
    return 1 - shared / (2 * old.shape[-1] - shared)


def replayed_gates(logits: Float[Tensor, "... E"], experts: Integer[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """Return the gates of forced experts: the softmax of live logits over the forced set, so the router still learns."""
    return torch.softmax(logits.gather(-1, experts.long()), dim=-1)
