"""The bias of a ratio as an importance weight, by exact enumeration of every response over a tiny vocabulary.

The old policy and the new one are tables: the logits of a token given its position and the token before it. For every
response y of L tokens the probability under both is known, so nothing is sampled:

    exact      sum_y pi(y) A(y) grad log pi(y)            the gradient of the expected advantage under the new policy
    token      sum_y old(y) A(y) mean_t w_t grad log pi_t      (GRPO)
    sequence   sum_y old(y) A(y) s mean_t grad log pi_t        (GSPO; s the geometric mean of the w_t)
    none       sum_y old(y) A(y) mean_t grad log pi_t          (no importance weight)
    product    sum_y old(y) A(y) (prod_t w_t) mean_t grad log pi_t   (the importance weight: no bias but the scale 1 / L)

The value of an arm is the sine of the angle between its gradient and the exact one: the part of the direction that no
learning rate repairs. Rewards are independent normal numbers, one for each response; A is centred and scaled under the old
policy.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from legato.compare.registration import Study
from legato.errors import InputError


def measure(study: Study, seed: int) -> Iterator[dict[str, Any]]:
    """The sine of every arm at every length and drift of the study."""
    vocabulary = int(study.settings["vocabulary"])
    arms = list(study.definition.arms)
    for length in study.definition.sweep["length"]:
        generator = torch.Generator().manual_seed(seed * 1000 + length)
        world = World(vocabulary, length, generator)
        for drift in study.definition.sweep["drift"]:
            sines = world.sines(drift, arms)
            for arm in arms:
                yield {"arm": arm, "point": {"length": length, "drift": drift}, "value": sines[arm]}


class World:
    """Two policies over responses of one length, and a reward for every response."""

    def __init__(self, vocabulary: int, length: int, generator: torch.Generator) -> None:
        self.responses = torch.tensor(list(product(range(vocabulary), repeat=length)))
        """[V^L, L]"""
        shape = (length, vocabulary + 1, vocabulary)
        self.old = torch.randn(shape, generator=generator, dtype=torch.float64)
        """Logits by position and token before; the last row stands for the beginning."""
        self.direction = torch.randn(shape, generator=generator, dtype=torch.float64)
        reward = torch.randn(len(self.responses), generator=generator, dtype=torch.float64)
        weight = self.token_logprobs(self.old).sum(1).exp()
        centred = reward - (weight * reward).sum()
        self.advantage = centred / (weight * centred.square()).sum().sqrt()

    def token_logprobs(self, logits: Tensor) -> Tensor:
        """[V^L, L]: the log-prob of every token of every response."""
        rows, length = self.responses.shape
        start = torch.full((rows, 1), logits.shape[2])
        before = torch.cat([start, self.responses[:, :-1]], dim=1)
        return logits.log_softmax(-1)[torch.arange(length), before, self.responses]

    def spread(self, scale: float) -> float:
        """The standard deviation of token log-ratios, under the old policy, after a move of this size."""
        old = self.token_logprobs(self.old)
        moved = self.token_logprobs(self.old + scale * self.direction) - old
        weight = old.sum(1).exp().unsqueeze(1) / old.shape[1]
        mean = (weight * moved).sum()
        return math.sqrt(float((weight * (moved - mean).square()).sum()))

    def sines(self, drift: float, arms: list[str]) -> dict[str, float]:
        """The sine of the angle to the exact gradient, for each arm, at a drift of the token log-ratios."""
        new = (self.old + solve(self.spread, drift) * self.direction).requires_grad_()
        old = self.token_logprobs(self.old)
        logprobs = self.token_logprobs(new)
        ratio = (logprobs - old).detach()
        weight = (old.sum(1).exp() * self.advantage).unsqueeze(1)
        weights = {
            "token": ratio.exp(),
            "sequence": ratio.mean(1, keepdim=True).exp(),
            "product": ratio.sum(1, keepdim=True).exp(),
            "none": torch.ones_like(ratio),
        }
        unknown = [arm for arm in arms if arm not in weights]
        if unknown:
            raise InputError(f"expected arms out of {', '.join(weights)}, got {unknown[0]!r}")
        exact = self.gradient((logprobs.sum(1).exp() * self.advantage).sum(), new)
        return {arm: sine(self.gradient((weight * weights[arm] * logprobs).sum(), new), exact) for arm in arms}

    @staticmethod
    def gradient(value: Tensor, logits: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0].flatten()


def sine(one: Tensor, other: Tensor) -> float:
    """The sine of the angle between two vectors, exact for small angles too."""
    one, other = one / one.norm(), other / other.norm()
    return float((one - (one @ other) * other).norm())


def solve(spread: Callable[[float], float], wanted: float, rounds: int = 60) -> float:
    """The size of a move with the wanted spread, by bisection."""
    low, high = 0.0, 1e-4
    while spread(high) < wanted:
        low, high = high, 2 * high
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if spread(middle) < wanted else (low, middle)
    return (low + high) / 2
